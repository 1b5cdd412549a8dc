"""Declare every kind of draft and every draft-length controller once, and parse a pair's `draft`.

What checks, explains and builds a draft or a controller reads its declaration. Only the text is
checked here: run/pair.py opens models, drafts/ and lengths/ have the classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from bass_cli.errors import nearest

SOURCES = ("own", "siblings", "prompt", "reference")
_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


class DraftKind(NamedTuple):
    """The declaration of a kind of draft.

    Args:
        word: The word of `draft`; "" for the name of a model.
        text: What it does, for the help page.
        make: MODULE:FUNCTION that makes the drafter of DraftParts (drafts/factory.py). It is
            named, because config imports no drafters.
        weights: The weights that it needs besides the target's: a checkpoint with the target's
            vocabulary ("model"), a checkpoint of layers that read the target's hidden states
            ("head"), such a layer of the target's checkpoint ("layer"), or None. A draft of
            "target" runs layers of the target.
        argument: The name of what follows the word and a colon; "" if nothing does.
        check: Raises a ValueError with the reason if an argument is not valid.
        optional: Whether the argument may be left out.
        parallel: Whether the model drafts all tokens in one pass, after a mask token for each.
    """

    word: str
    text: str
    make: str
    weights: Literal["model", "head", "layer", "target"] | None = None
    argument: str = ""
    check: Callable[[str], object] = str
    optional: bool = False
    parallel: bool = False

    @property
    def reads(self) -> bool:
        """Whether it reads the target's hidden states."""
        return self.weights in ("head", "layer")

    @property
    def help(self) -> str:
        """Its form and what it does."""
        after = f":{self.argument}" if self.argument else ""
        form = self.word + (f"[{after}]" if self.optional else after)
        return f"{form} ({self.text})" if form and self.text else form or self.text


class Draft(NamedTuple):
    """A parsed draft.

    Args:
        kind: Its declaration.
        argument: What follows the word; for a model by itself its name.
        otherwise: The draft if the target's checkpoint has no layer for mtp; None if the draft does
            not depend on it.
    """

    kind: DraftKind
    argument: str = ""
    otherwise: str | None = None

    @property
    def files(self) -> str | None:
        """The model to load in addition to the target; None if there is none."""
        return self.argument if self.kind.weights in ("model", "head") else None


def parse_draft(text: str) -> Draft:
    """Parse a `draft`; ValueError if it is not valid."""
    if text in OTHERWISE:
        return parse_draft("mtp")._replace(otherwise=OTHERWISE[text])
    if re.match(r"lookup(:.*)?\+", text):
        model = text.partition("+")[2]
        raise ValueError(
            f'"{text}" is no draft: lookup beside a model was removed, because the model alone was '
            f'faster; use "{model or "MODEL"}" or "lookup"'
        )
    kind = _kind_of(text)
    if kind is _MODEL or text == kind.word:
        return Draft(kind, text if kind is _MODEL else "")
    argument = text.removeprefix(f"{kind.word}:").strip()
    try:
        kind.check(argument)
    except ValueError as error:
        raise ValueError(f'"{text}": {error}') from None
    return Draft(kind, argument)


def parse_layers(text: str) -> tuple[tuple[int, int], ...]:
    """Parse layers like 4-9,12 to the first and last layer of each range; ValueError if they are
    not valid."""
    found = [_RUN.fullmatch(part.strip()) for part in text.split(",")]
    runs = tuple((int(run[1]), int(run[2] or run[1])) for run in found if run is not None)
    if len(runs) < len(found) or any(last < first for first, last in runs):
        raise ValueError("write the layers to skip like skip:4-9,12")
    return runs


def parse_sources(text: str) -> tuple[str, ...]:
    """Parse the sources of lookup; ValueError if they are not valid.

    The source "siblings" means all samples of a prompt, so it includes "own".
    """
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if word not in SOURCES:
            raise ValueError(f'there is no source "{word}" to look in; {nearest(word, SOURCES)}')
    return tuple(dict.fromkeys(found))


def check_target(text: str) -> str:
    """Return the text; ValueError if only a draft may have this form."""
    kind = _kind_of(text)
    if kind.argument and not kind.optional:
        raise ValueError(f'a target is a model by itself; "{kind.word}:" is for drafts')
    return text


def check_draft(text: str) -> str:
    """Return the text; ValueError as in `parse_draft`."""
    parse_draft(text)
    return text


def _kind_of(text: str) -> DraftKind:
    """Return the kind whose word a draft has; that of a model by itself if it has none."""
    for kind in DRAFTS:
        bare = not kind.argument or kind.optional
        if (bare and text == kind.word) or (kind.argument and text.startswith(f"{kind.word}:")):
            return kind
    return _MODEL


def _model_or(remedy: str) -> Callable[[str], None]:
    """Return a check of an argument that is the name of a model."""

    def check(model: str) -> None:
        word = model in OTHERWISE or model.startswith("lookup+") or _kind_of(model) is not _MODEL
        if not model or word:
            raise ValueError(remedy)

    return check


_MODEL = DraftKind("", "a model (like --model)", "bass_cli.drafts.model:make", "model")
DRAFTS = (
    DraftKind(
        "parallel",
        "drafts all tokens in one pass",
        "bass_cli.drafts.model:make_parallel",
        "model",
        "MODEL",
        _model_or(
            "write it like parallel:MODEL, with a hub id, a folder or a .gguf file of a model that "
            "was trained to draft in one pass"
        ),
        parallel=True,
    ),
    DraftKind(
        "heads",
        "reads the target's hidden states",
        "bass_cli.drafts.heads:make",
        "head",
        "PATH",
        _model_or(
            "write it like heads:PATH, with a folder or a hub id of a drafter that reads hidden "
            "states (DFlash, DSpark, EAGLE-3)"
        ),
    ),
    DraftKind(
        "mtp",
        "the layer of the target's checkpoint that predicts further tokens",
        "bass_cli.drafts.heads:make",
        "layer",
    ),
    DraftKind(
        "lookup",
        f"copies from earlier text; sources: {', '.join(SOURCES)}",
        "bass_cli.drafts.ngram:make",
        argument="SOURCES",
        check=parse_sources,
        optional=True,
    ),
    DraftKind(
        "skip",
        "the target without these layers",
        "bass_cli.drafts.model:make",
        "target",
        "LAYERS",
        parse_layers,
    ),
    DraftKind("none", "", "bass_cli.drafts.factory:make_none"),
)
# Drafts that depend on the target's checkpoint: the draft if it has no layer for mtp
OTHERWISE = {"mtp-or-lookup": "lookup", "mtp-or-none": "none"}
DRAFT_HELP = (
    f"The draft: {', '.join(kind.help for kind in (_MODEL, *DRAFTS))}, or mtp only if the "
    f"checkpoint has it: {', '.join(OTHERWISE)}"
)
DRAFT_WORDS = (
    *sorted(kind.word for kind in DRAFTS if not kind.argument or kind.optional),
    *OTHERWISE,
)


class ControllerKind(NamedTuple):
    """The declaration of a draft-length controller.

    Args:
        text: What it does, for the help page.
        make: MODULE:FUNCTION that makes it of LengthParts (lengths/controllers.py).
        profile: Whether the round costs of a profile decide the lengths: always ("needed"), if
            there is a profile ("used"), or never (None).
    """

    text: str
    make: str
    profile: Literal["needed", "used"] | None = None


Controller = Literal["auto", "bass", "table", "bass+table"]
CONTROLLERS: dict[Controller, ControllerKind] = {
    "auto": ControllerKind(
        "from the measured cost of a round and the acceptance rate",
        "bass_cli.lengths.controllers:make_auto",
        "used",
    ),
    "bass": ControllerKind("Algorithm 1 of the paper", "bass_cli.lengths.controllers:make_bass"),
    "table": ControllerKind(
        "by batch size, from bass profile", "bass_cli.lengths.controllers:make_table", "needed"
    ),
    "bass+table": ControllerKind("", "bass_cli.lengths.controllers:make_capped", "needed"),
}
LENGTH_HELP = ", ".join(
    f"{word} ({kind.text})" if kind.text else word for word, kind in CONTROLLERS.items()
)


def needs_profile(lengths: Sequence[str | int]) -> bool:
    """Return whether one of these draft lengths needs a profile."""
    return any(CONTROLLERS[word].profile == "needed" for word in CONTROLLERS if word in lengths)
