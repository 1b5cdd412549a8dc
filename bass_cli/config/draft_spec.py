"""What a pair's `draft` may say: none, lookup, lookup:SOURCES, a model, parallel:MODEL or
heads:PATH. Only the words.

Not here: whether the model is there (plan.py), who drafts (drafting/).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from bass_cli.errors import UserError, nearest

SOURCES = ("own", "siblings", "prompt", "reference")
_LOOKUP, _SKIP, _PARALLEL, _HEADS = "lookup", "skip:", "parallel:", "heads:"
_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


class Draft(NamedTuple):
    """`sources`: where tokens are looked up, empty without lookup. `model`: a hub id, folder,
    file or skip:LAYERS; None with lookup, or without a draft. `parallel`: it drafts all in one
    pass; `reads`: it is no model by itself, but reads the target's hidden states."""

    sources: tuple[str, ...]
    model: str | None
    parallel: bool = False
    reads: bool = False

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
        what = "a hub id, a folder or a .gguf file of a model that was trained to draft in one pass"
        return Draft((), _behind(_PARALLEL, "MODEL", what, text), parallel=True)
    if text.startswith(_HEADS):
        what = (
            "a folder or a hub id of a drafter that reads hidden states (DFlash, DSpark, EAGLE-3)"
        )
        return Draft((), _behind(_HEADS, "PATH", what, text), reads=True)
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


def skipped_layers(text: str, layers: int) -> frozenset[int]:
    """The layers in skip:LAYERS, like skip:4-9,12; none for another draft. UserError unless they
    are some but not all of the target's."""
    runs = parse_layers(text)
    inside = all(last < layers for _, last in runs)
    found = {layer for first, last in runs for layer in range(first, last + 1) if inside}
    if not inside or len(found) == layers:
        raise UserError(
            f'draft "{text}": the target has layers 0 to {layers - 1}; skip at least one and not '
            "all"
        )
    return frozenset(found)


def check_target(text: str) -> str:
    """The same text; ValueError where only a draft may be that."""
    word = next((it for it in (_SKIP, _PARALLEL, _HEADS) if text.startswith(it)), None)
    if word is not None:
        raise ValueError(f'a target is a model by itself; "{word}" is for drafts')
    return text


def check_draft(text: str) -> str:
    """The text as it is; ValueError as in `parse_draft`."""
    parse_draft(text)
    return text


def _behind(prefix: str, word: str, what: str, text: str) -> str:
    """The model behind a prefix."""
    model = text.removeprefix(prefix).strip()
    others = (_SKIP, _PARALLEL, _HEADS)
    if not model or model == "none" or _is_lookup(model) or model.startswith(others):
        raise ValueError(f'"{text}": write it like {prefix}{word}, with {what}')
    return model


def _is_lookup(text: str) -> bool:
    return text == _LOOKUP or text.startswith((f"{_LOOKUP}:", f"{_LOOKUP}+"))


def _sources(text: str, words: str) -> tuple[str, ...]:
    found = [word.strip() for word in words.split(",")]
    for word in found:
        if word not in SOURCES:
            raise ValueError(
                f'"{text}": there is no source "{word}" to look in; {nearest(word, SOURCES)}'
            )
    return tuple(dict.fromkeys(found))
