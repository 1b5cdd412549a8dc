"""Writes tests/model/data/llama_cpp.json: ids that llama.cpp gives, for tests that must not need it.

Needs the packages llama-cpp-python, gguf and tokenizers: `python tests/support/llama_cpp_ids.py`.
No tests here (tests/model/test_gguf_tokenizer.py).
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "tests" / "model" / "data" / "llama_cpp.json"
# Texts in NFC, without what llama.cpp's own matchers and the published patterns read differently.
TEXTS = (
    "", " ", "   leading and trailing  ", "\n\n\n x\n \n", "\t\ta\tb \t\n", "a\r\nb\r\n\r\nc\r",
    "x   y    z     w", " 1 22 333 4444 55555 3.14159 1000000", "１２３ ²³¹ ½ Ⅷ ٣٤٥",
    "Hello, y'all! I've been 'told HE'S there, we'd've don'T",
    "foo_bar fooBar XMLHttpRequest2 /a//b/\n/c",
    "def f(x):\n    if x == 1:\n\t\treturn [x, 22]\n\n\nclass A:\n        pass # 12345\n",
    "我想在apple工作1314151天～。“引号”（括号）", "日本語のテキスト。カタカナ！ 한국어 안녕하세요", "нещо на Български नमस्ते ที่ x\u0301y",
    "🚀 (normal) 😶\u200d🌫️ ✅ ===--- ''''``` \"\"\"...!!!???",
    "\u00a0nbsp\u3000ideo\u200bzw",
    "$100 + €20 = £3 ^_^ ~a |b| <c>",
    "whole (whole", " " * 37 + "x" + "\n" * 5,
)  # fmt: skip


def vocabulary() -> dict[str, Any]:
    """A byte-level vocabulary whose merges cross words, digits, spaces and lines, so that ids show
    where a text was cut. "whole" and " whole" are tokens that no merges make."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False, max_token_length=9
    )
    learnt = [text for text in TEXTS if "whole" not in text]
    inner.train_from_iterator([text for text in learnt for _ in range(3)], trainer)
    model = json.loads(inner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    tokens = ["<s>", "<end>", *tokens, "whole", "Ġwhole"]
    return {"tokens": tokens, "merges": [" ".join(merge) for merge in merges]}


def write(path: Path, values: dict[str, Any]) -> None:
    """A GGUF file with these fields under `tokenizer.ggml.` and one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        kind = gguf.GGUFValueType.get_type(value)
        kind = gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
        writer.add_key_value(f"tokenizer.ggml.{key}", value, kind)
    writer.add_tensor("token_embd.weight", np.zeros((len(values["tokens"]), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path, texts: tuple[str, ...]) -> dict[str, Any] | None:
    """What llama.cpp makes of it; None if it refuses the file."""
    import llama_cpp

    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        return None
    vocab = llama_cpp.llama_model_get_vocab(model)
    found = []
    for text in texts:
        raw = text.encode()
        ids = (llama_cpp.llama_token * (4 * len(raw) + 16))()
        count = llama_cpp.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, True)
        found.append(list(ids[:count]))
    size = llama_cpp.llama_vocab_n_tokens(vocab)
    return {
        "ids": found,
        "add_bos": bool(llama_cpp.llama_vocab_get_add_bos(vocab)),
        "ends": [id_ for id_ in range(size) if llama_cpp.llama_vocab_is_eog(vocab, id_)],
    }


def byte_level(vocab: dict[str, Any], pre: str) -> dict[str, Any]:
    """The fields of a file with this vocabulary and pre-tokenizer."""
    kinds = [3, 3] + [1] * (len(vocab["tokens"]) - 2)
    return {
        "model": "gpt2", "pre": pre, "tokens": vocab["tokens"], "token_type": kinds,
        "merges": vocab["merges"], "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def with_ends(vocab: dict[str, Any], texts: list[str], kind: int) -> dict[str, Any]:
    """The same with more tokens, all of one kind."""
    fields = byte_level(vocab, "gpt-2")
    fields["tokens"] = [*fields["tokens"], *texts]
    fields["token_type"] = [*fields["token_type"], *[kind] * len(texts)]
    return fields


def main() -> None:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    names, vocab, groups = sys.argv[1].split(), vocabulary(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        for name in names:
            write(path, byte_level(vocab, name))
            found = read(path, TEXTS)
            assert found is not None, name
            del found["ends"]
            same = next((group for group in groups if group["found"] == found), None)
            if same is None:
                groups.append(same := {"names": [], "found": found})
            same["names"].append(name)
        ends = []
        sys.path.insert(0, str(ROOT))
        from bass_cli.formats.backends import END_TEXTS, ROLE_TEXTS

        every = [*END_TEXTS, *(text for texts in ROLE_TEXTS.values() for text in texts)]
        for texts in ([text] for text in every):
            for kind in (1, 3, 4):
                write(path, with_ends(vocab, texts, kind))
                found = read(path, ())
                ends.append([texts, kind, found and found["ends"]])
        for texts in (
            ["<|end|>", "<|return|>", "<|call|>"],
            ["<|end|>", "<|flush|>", "<|calls|>"],
            ["<|end|>", "<|return|>", "<|flush|>"],
            ["<|end|>", "<|call|>", "<|calls|>"],
            ["<|end|>", "<|im_end|>", "<|other|>"],
            ["<|tool_response>", "<eos>"],
        ):
            write(path, with_ends(vocab, texts, 3))
            ends.append([texts, 3, read(path, ())["ends"]])
    version = f"llama-cpp-python {llama_cpp.__version__}"
    content = {"source": version, **vocab, "texts": TEXTS, "groups": groups, "ends": ends}
    OUT.write_text(json.dumps(content, ensure_ascii=True) + "\n")
    print(f"{OUT}: {OUT.stat().st_size} bytes, {len(groups)} groups")


if __name__ == "__main__":
    main()
