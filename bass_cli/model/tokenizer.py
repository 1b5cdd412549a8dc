"""Text to ids and back: encoding, chat templates, the check that draft and target share a
vocabulary.

The only importer of transformers, which is slow to import and so imported when first used. The
tokenizer in a GGUF file takes transformers seconds to convert; the result is kept in the user's
cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bass_cli.errors import UserError
from bass_cli.io.reading import open_regular, parse_json, read_bytes
from bass_cli.model.gguf_file import read_gguf
from bass_cli.model.template import Template
from bass_cli.model.text_length import Spelling, spelling_of
from bass_cli.system.host import cache_folder

_CONVERSION = 2  # raise it when what we do to a converted tokenizer changes
_HEAD = 1 << 24  # bytes of a GGUF file that tell it apart: the vocabulary is at the front
_PADDING = re.compile(r"\[PAD\d+\]")  # what GGUF writers call rows without a token
_PLACEHOLDER = re.compile(r"\[PAD\d+\]|<unused\d+>|\[unused\d+\]")
_PROBE = (
    "Hello  12345 wörld's \n\n\tif x==1: // 你好 🙂 \u0301"  # its ids tell pre-tokenizers apart
)
_CONTROL = 3  # the kind of a GGUF token that has no text
_NAMING = ("tokenizer_config.json", "config.json")  # the files that may name a tokenizer class
# that transformers reads
_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    *_NAMING,
)
_MOST_BYTES = 1 << 27  # of one of them; the largest known, of 262,144 tokens, has a quarter of that
_OTHER_TOKENIZER = (
    'name a folder whose tokenizer is data (tokenizer.json) as "tokenizer" in a pair file'
)
# transformers' name to GGUF's
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}


class Tokenizer:
    """A model's tokenizer as its files have it. `texts`: how the vocabulary spells each id.
    `size`: one more than the largest id that is a token (padding rows, which GGUF writers call
    [PAD123], are none)."""

    def __init__(self, inner: Any, path: Path):
        self._inner, self.path = inner, path
        self.texts: dict[int, str] = {id_: text for text, id_ in inner.get_vocab().items()}
        self.size = _trimmed(self.texts, _PADDING)
        self._template = Template(
            lambda messages: inner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )

    @functools.cached_property
    def _spelling(self) -> Spelling | None:
        return spelling_of(getattr(self._inner, "backend_tokenizer", None), self._inner.get_vocab())

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a model's folder or .gguf file; UserError if there is none that transformers can
        read, or if it is code of the folder's own, which is never run."""
        import transformers

        folder = path if path.is_dir() else path.parent
        _check_files(folder)
        _refuse_code(folder)

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        with _refusals(f"{path}: no tokenizer can be read there"):
            return cls(_from_gguf(path) if path.suffix == ".gguf" else _read(path), path)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-sequence id, if there is one."""
        id_ = self._inner.eos_token_id
        return () if id_ is None else (id_,)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer puts around a text. This
        and the next two: UserError where there is half of a surrogate pair in the text, and
        where its length alone tells that it has more than `most` tokens; a text of which that is
        not certain may have more too."""
        with _refusals(f"{self.path}: the tokenizer cannot read the text"):
            return self._inner(self._checked(text, most))["input_ids"]

    def encode_part(self, text: str, most: int | None = None) -> list[int]:
        """Ids of a text as it may stand inside another, without special tokens."""
        with _refusals(f"{self.path}: the tokenizer cannot read the text"):
            return self._inner(self._checked(text, most), add_special_tokens=False)["input_ids"]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None
    ) -> list[int]:
        """Ids of a conversation that is the assistant's to go on; UserError if there is no
        template or it refuses."""
        if not self.has_chat_template:
            raise UserError(
                f"{self.path}: the tokenizer has no chat template, so messages cannot be used"
            )
        return self.encode_part(
            self._template(messages), most
        )  # the template has written its own special tokens

    def _checked(self, text: str, most: int | None) -> str:
        """The text, if it is Unicode (half of a surrogate pair, which JSON can spell, has no
        bytes) and not too long."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start + 1} of the text is half of a surrogate pair, which is "
                "not text"
            ) from None
        if most is not None and len(text) > most and self._spelling is not None:
            fewest = self._spelling.fewest_tokens(text)
            if fewest > most:
                raise UserError(
                    f"the text has {len(text)} characters, so at least {fewest} tokens, and the "
                    f"model's context {most}"
                )
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, spaces as they are."""
        return self._inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def fingerprint(self) -> str:
        """A digest of the vocabulary, the chat template and how a piece of text is cut."""
        digest = hashlib.sha256()
        for part in (sorted(self.texts.items()), self._inner.chat_template, self.encode(_PROBE)):
            digest.update(repr(part).encode())
        return digest.hexdigest()[:32]


@contextlib.contextmanager
def _refusals(fault: str) -> Iterator[None]:
    """UserError, beginning with `fault`, for whatever transformers raises at a file that is
    missing, broken or unknown: many kinds, and what tokenizers raises where its own code fails
    is no Exception."""
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise UserError(f"{fault}: {reason[:300]}") from None


def _check_files(folder: Path) -> None:
    """UserError where a file that would be read is none, or too large for what it is."""
    for path in (path for pattern in _FILES for path in folder.glob(pattern) if not path.is_dir()):
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UserError(f"{path}: cannot read the file: {error.strerror}") from None
        if size > _MOST_BYTES:
            raise UserError(
                f"{path}: it has {size} bytes, and {_MOST_BYTES} are the most that such a file "
                "may have"
            )


def _refuse_code(folder: Path) -> None:
    """UserError where a folder's files name a tokenizer class that is none of transformers'.
    Other classes there count too: it would take AutoModel for a tokenizer, whose `auto_map` then
    says which code to run."""
    import transformers
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for name in _NAMING:
        try:
            content = parse_json(read_bytes(folder / name, _MOST_BYTES))
        except (OSError, ValueError):
            continue  # not there, or broken: reading it will say so
        if not isinstance(content, dict):
            continue
        code = content.get("auto_map")
        if names := _named(code.get("AutoTokenizer") if isinstance(code, dict) else code):
            raise UserError(
                f'{folder / name}: key "auto_map": the tokenizer is code of the model\'s own '
                f"({names}), which is never run; {_OTHER_TOKENIZER}"
            )
        kind = content.get("tokenizer_class")
        found = tokenizer_class_from_name(kind) if isinstance(kind, str) else None
        if kind is not None and not (
            isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)
        ):
            raise UserError(
                f'{folder / name}: key "tokenizer_class": transformers {transformers.__version__} '
                f"has no tokenizer class {_named(kind)} here; {_OTHER_TOKENIZER}"
            )


def _named(value: Any) -> str:
    """The names in an entry of a configuration: a text, or a list with some."""
    return ", ".join(
        repr(one) for one in (value if isinstance(value, list) else [value]) if one is not None
    )


def _read(folder: Path, **options: Any) -> Any:
    """What transformers makes of a folder's files. Code among them is never run, and nobody is
    asked whether it may be."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)


def _from_gguf(path: Path) -> Any:
    """The converted tokenizer, from the cache if it is there and whole."""
    import transformers

    with path.open("rb") as file:
        head = hashlib.blake2b(file.read(_HEAD), digest_size=8).hexdigest()
    base = cache_folder() / "tokenizers"
    name = f"{path.stem}-{path.stat().st_size}-{head}-{transformers.__version__}-{_CONVERSION}"
    try:
        return _read(base / name)
    except Exception:  # not there, or broken: whatever the reason, it is made anew
        shutil.rmtree(base / name, ignore_errors=True)
    inner = _convert(path)
    try:
        base.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=base))
        try:
            inner.save_pretrained(fresh)
            fresh.rename(base / name)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError:
        pass  # a cache that cannot be written, or that another process has just written
    return inner


def _convert(path: Path) -> Any:
    from tokenizers import pre_tokenizers

    metadata, entries = read_gguf(path)
    inner = _read(path.parent, gguf_file=path.name)
    if metadata.get("tokenizer.ggml.pre") in ("smollm", "starcoder"):
        # Unknown to transformers. They cut off every digit first, so that spaces before a number
        # stay together.
        digits, rest = (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        inner.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    _mark_control_tokens(inner, metadata.get("tokenizer.ggml.token_type") or ())
    for kind, name in _SPECIAL.items():  # some versions of transformers get them wrong
        if (id_ := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            setattr(inner, kind, inner.convert_ids_to_tokens(id_))
    return _without_extras(inner, entries["token_embd.weight"].shape[0])


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


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """UserError naming the first id whose token differs, up to the smaller vocabulary (but
    placeholders at its end)."""
    size = min(_trimmed(one.texts, _PLACEHOLDER) for one in (target, draft))
    for id_ in sorted(id_ for id_ in target.texts.keys() | draft.texts.keys() if id_ < size):
        ours, theirs = target.texts.get(id_), draft.texts.get(id_)
        if ours != theirs:
            raise UserError(
                f"the vocabularies of target and draft differ: id {id_} is {ours!r} in "
                f"{target.path} and {theirs!r} in {draft.path}"
            )


def _trimmed(texts: Mapping[int, str], placeholder: re.Pattern[str]) -> int:
    """One more than the largest id that is no placeholder."""
    return 1 + max(
        (id_ for id_, text in texts.items() if not placeholder.fullmatch(text)), default=-1
    )
