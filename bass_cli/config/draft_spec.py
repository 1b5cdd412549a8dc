"""What a pair's `draft` may say: none, lookup, lookup:SOURCES, a model, or parallel:MODEL. Only the
words.

Not here: whether the model is there (plan.py), who drafts (drafting/).
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

SOURCES = ("own", "siblings", "prompt", "reference")
_LOOKUP, _SKIP, _PARALLEL = "lookup", "skip:", "parallel:"
_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


class Draft(NamedTuple):
    """`sources`: where tokens are looked up, empty without lookup. `model`: a hub id, folder,
    file or skip:LAYERS; None with lookup, or without a draft. `parallel`: it drafts all in one
    pass."""

    sources: tuple[str, ...]
    model: str | None
    parallel: bool = False

    @property
    def files(self) -> str | None:
        """The model that is needed beside the target, if any."""
        return None if self.model is None or self.model.startswith(_SKIP) else self.model


def parse_draft(text: str) -> Draft:
    """The parts of a `draft`; ValueError says what is wrong with it. "siblings" are all samples
    of a prompt, so they include "own"."""
    if text == "none":
        return Draft((), None)
    if text.startswith(_PARALLEL):
        return Draft((), _parallel(text), parallel=True)
    if not _is_lookup(text):
        parse_layers(text)
        return Draft((), text)
    words, plus, model = text.removeprefix(_LOOKUP).partition("+")
    if plus:
        raise ValueError(
            f'"{text}" is no draft: lookup beside a model was removed, because the model alone was '
            f'faster; use "{model or "MODEL"}" or "lookup"'
        )
    return Draft(_sources(text, words.removeprefix(":")) if words else SOURCES, None)


def parse_layers(text: str) -> tuple[tuple[int, int], ...]:
    """The first and last of each run of layers in skip:LAYERS, like skip:4-9,12; none if the
    text is no such draft. ValueError says how they are written."""
    if not text.startswith(_SKIP):
        return ()
    found = [_RUN.fullmatch(part.strip()) for part in text.removeprefix(_SKIP).split(",")]
    runs = tuple((int(run[1]), int(run[2] or run[1])) for run in found if run is not None)
    if len(runs) < len(found) or any(last < first for first, last in runs):
        raise ValueError(f'"{text}": write the layers to skip like skip:4-9,12')
    return runs


def check_draft(text: str) -> str:
    """The text as it is; ValueError as in `parse_draft`."""
    parse_draft(text)
    return text


def _parallel(text: str) -> str:
    model = text.removeprefix(_PARALLEL).strip()
    if not model or model == "none" or _is_lookup(model) or model.startswith((_SKIP, _PARALLEL)):
        raise ValueError(
            f'"{text}": write it like parallel:MODEL, with a hub id, a folder or a .gguf file of a '
            "model that was trained to draft in one pass"
        )
    return model


def _is_lookup(text: str) -> bool:
    return text == _LOOKUP or text.startswith((f"{_LOOKUP}:", f"{_LOOKUP}+"))


def _sources(text: str, words: str) -> tuple[str, ...]:
    found = [word.strip() for word in words.split(",")]
    for word in found:
        if word not in SOURCES:
            close = difflib.get_close_matches(word, SOURCES, n=1, cutoff=0.5)
            hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(SOURCES)}"
            raise ValueError(f'"{text}": there is no source "{word}" to look in; {hint}')
    return tuple(dict.fromkeys(found))
