"""Parse a pair's `draft`: none, lookup, lookup:SOURCES, mtp, mtp-or-lookup, mtp-or-none, a model,
skip:LAYERS, parallel:MODEL or heads:PATH.

Only the text is checked here. run/pair.py opens the model; drafts/ has the drafters.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from bass_cli.errors import UserError, nearest

SOURCES = ("own", "siblings", "prompt", "reference")
_LOOKUP, _SKIP, _PARALLEL, _HEADS = "lookup", "skip:", "parallel:", "heads:"
MTP = "mtp"
# Drafts that depend on the target's checkpoint: the draft if it has no layer for mtp
OTHERWISE = {"mtp-or-lookup": "lookup", "mtp-or-none": "none"}
_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


class Draft(NamedTuple):
    """A parsed draft.

    Args:
        sources: The texts in which tokens are looked up; empty for other drafts.
        model: A hub id, folder, file, skip:LAYERS or mtp; None for lookup, or without a draft.
        parallel: Whether the model drafts all tokens in one pass.
        reads: Whether it is a draft head, which reads the target's hidden states.
        otherwise: The draft if the target's checkpoint has no layer for mtp; None if the draft does
            not depend on it.
    """

    sources: tuple[str, ...]
    model: str | None
    parallel: bool = False
    reads: bool = False
    otherwise: str | None = None

    @property
    def files(self) -> str | None:
        """The model to load in addition to the target; None if there is none."""
        own = self.model is None or self.model == MTP or self.model.startswith(_SKIP)
        return None if own else self.model


def parse_draft(text: str) -> Draft:
    """Parse a `draft`; ValueError if it is not valid.

    The source "siblings" means all samples of a prompt, so it includes "own".
    """
    if text == "none":
        return Draft((), None)
    if text == MTP or text in OTHERWISE:
        return Draft((), MTP, reads=True, otherwise=OTHERWISE.get(text))
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
    """Parse skip:LAYERS, like skip:4-9,12, to the first and last layer of each range.

    Other drafts give no ranges. ValueError if the layers are not valid.
    """
    if not text.startswith(_SKIP):
        return ()
    found = [_RUN.fullmatch(part.strip()) for part in text.removeprefix(_SKIP).split(",")]
    runs = tuple((int(run[1]), int(run[2] or run[1])) for run in found if run is not None)
    if len(runs) < len(found) or any(last < first for first, last in runs):
        raise ValueError(f'"{text}": write the layers to skip like skip:4-9,12')
    return runs


def skipped_layers(text: str, layers: int) -> frozenset[int]:
    """Return the layers of skip:LAYERS; none for another draft.

    UserError unless they are some, but not all, of the target's layers.
    """
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
    """Return the text; ValueError if only a draft may have this form."""
    word = next((it for it in (_SKIP, _PARALLEL, _HEADS) if text.startswith(it)), None)
    if word is not None:
        raise ValueError(f'a target is a model by itself; "{word}" is for drafts')
    return text


def check_draft(text: str) -> str:
    """Return the text; ValueError as in `parse_draft`."""
    parse_draft(text)
    return text


def _behind(prefix: str, word: str, what: str, text: str) -> str:
    """Return the model after a prefix."""
    model = text.removeprefix(prefix).strip()
    others = (_SKIP, _PARALLEL, _HEADS)
    own = ("none", MTP, *OTHERWISE)
    if not model or model in own or _is_lookup(model) or model.startswith(others):
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
