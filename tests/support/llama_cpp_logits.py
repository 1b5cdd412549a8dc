"""Writes tests/model/data/llama_cpp_logits.json: logits of tiny GGUF files by llama.cpp, for tests that
must not need it.

Needs the package llama-cpp-python: `python tests/support/llama_cpp_logits.py`. No tests here
(tests/model/test_parity.py).
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import GGUF_FAMILIES, write_gguf
from gguf_layouts import HYBRID, LAYOUTS

OUT = Path(__file__).parent.parent / "model" / "data" / "llama_cpp_logits.json"
VOCAB = 301
TOKENS = [(7 * i * i + 11 * i + 5) % (VOCAB - 3) + 3 for i in range(24)]
POSITIONS = (0, 9, 23)
IDS = 24  # of the vocabulary, the first ones
# Values for which llama.cpp computes what transformers does: it ignores `truncate` of gpt-oss's
# YaRN, which changes nothing here, and windows of most families.
_GPT_OSS = {
    "rope_parameters": {
        "rope_type": "yarn", "factor": 8.0, "rope_theta": 3.4, "truncate": False,
        "original_max_position_embeddings": 64,
    }
}  # fmt: skip
_PLAIN = {"attention_bias": False, "mlp_bias": False, "head_dim": 16}
OVERRIDES = {
    "gpt_oss": _GPT_OSS, "llama": _PLAIN, "llama3": _PLAIN, "qwen2": {"head_dim": 32},
}  # fmt: skip
# llama.cpp reads GELU from a table in float16, which moves logits by 3e-3
_GELU = ("gemma3_text", "starcoder2", "gpt2")
FAMILIES = (*(name for name in GGUF_FAMILIES if name not in _GELU), *LAYOUTS)


def write(family: str, path: Path) -> None:
    """A file with a vocabulary, which llama.cpp needs."""
    arch = LAYOUTS[family][0] if family in LAYOUTS else GGUF_FAMILIES[family]
    texts = ["<pad>", "<s>", "</s>", *(f"t{i}" for i in range(3, VOCAB))]
    vocabulary: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": [3] * 3 + [1] * (VOCAB - 3),
        "tokenizer.ggml.merges": ["t 3"], "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    if arch in HYBRID and arch != "qwen3next":
        vocabulary[f"{arch}.rope.dimension_sections"] = [1, 1, 0, 0]
    write_gguf(family, path, kind="F32", metadata=vocabulary, **OVERRIDES.get(family, {}))


def main() -> None:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            path = Path(folder, f"{family}.gguf")
            write(family, path)
            model = llama_cpp.Llama(
                str(path), n_ctx=64, logits_all=True, verbose=False, type_k=0, type_v=0,
                flash_attn=False, n_threads=1,
            )  # fmt: skip
            model.eval(TOKENS)
            logits = np.array(model.scores[list(POSITIONS), :IDS])
            found[family] = np.round(logits, 5).tolist()
    content = {"source": f"llama-cpp-python {llama_cpp.__version__}", "logits": found}
    OUT.write_text(json.dumps(content) + "\n")
    print(f"{OUT}: {OUT.stat().st_size} bytes, {len(found)} families")


if __name__ == "__main__":
    main()
