"""The tokenizer in a GGUF file, converted by transformers.

Not here: the file's header (gguf_file.py), the cache of converted tokenizers (tokenizer_files.py).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bass_cli.model.gguf_config import ARCHITECTURES
from bass_cli.model.gguf_file import read_gguf
from bass_cli.model.tokenizer_parts import TokenizerParts

_CONTROL = 3  # the kind of a GGUF token that has no text
# transformers' name to GGUF's
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Return the parts of the tokenizer in a .gguf file."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    inner = _convert(path)
    return TokenizerParts(
        inner.backend_tokenizer.to_str().encode(),
        inner.chat_template or None,
        dict(inner.special_tokens_map),
        () if inner.eos_token_id is None else (inner.eos_token_id,),
        bool(inner.split_special_tokens),
    )


def _convert(path: Path) -> Any:
    """What transformers makes of the tokenizer in a GGUF file."""
    from tokenizers import normalizers, pre_tokenizers

    metadata, entries, _ = read_gguf(path)
    inner = _read_gguf(path, str(metadata.get("general.architecture")))
    # What transformers does not know of these, or forgets.
    match metadata.get("tokenizer.ggml.pre"):
        case "smollm" | "starcoder":
            # They cut off every digit first, so that spaces before a number stay together.
            digits, rest = (
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            )
            inner.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
        case "qwen2":
            inner.backend_tokenizer.normalizer = normalizers.NFC()
    _mark_control_tokens(inner, metadata.get("tokenizer.ggml.token_type") or ())
    for kind, name in _SPECIAL.items():  # some versions of transformers get them wrong
        if (id_ := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(inner, kind, inner.convert_ids_to_tokens(id_))
    return _without_extras(inner, entries["token_embd.weight"].shape[0])


def _read_gguf(path: Path, architecture: str) -> Any:
    """By the class that transformers has for the family: to find out which that is, it would read
    the header at a hundred microseconds a token. From a folder where nothing else lies that it
    might read too."""
    import transformers

    kind, reader = ARCHITECTURES.get(architecture), transformers.PreTrainedTokenizerFast
    if kind is not None:
        config = transformers.CONFIG_MAPPING[kind.family]
        reader = transformers.TOKENIZER_MAPPING.get(config, reader)
    with tempfile.TemporaryDirectory(prefix="bass-tokenizer-") as folder:
        Path(folder, path.name).symlink_to(path.resolve())
        return reader.from_pretrained(folder, gguf_file=path.name)


def _mark_control_tokens(inner: Any, kinds: Sequence[int]) -> None:
    """What the file calls control tokens has no text; some versions of transformers take them
    for ordinary tokens."""
    import tokenizers

    texts = (inner.convert_ids_to_tokens(id_) for id_, kind in enumerate(kinds) if kind == _CONTROL)
    inner.backend_tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in texts
            if text is not None
        ]
    )


def _without_extras(inner: Any, rows: int) -> Any:
    """Less the tokens that transformers' class has by default, like <|endoftext|>, and the model
    has no row for."""
    import tokenizers
    import transformers

    content = json.loads(inner.backend_tokenizer.to_str())
    extras = {token["content"] for token in content["added_tokens"] if token["id"] >= rows}
    if not extras:
        return inner
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < rows]
    special = {kind: getattr(inner, kind) for kind in _SPECIAL}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(content)),
        chat_template=inner.chat_template,
        **{kind: text for kind, text in special.items() if text not in extras},
    )
