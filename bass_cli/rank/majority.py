"""Majority voting: how many of a prompt's samples give the same answer.

This is self-consistency (Wang et al. 2022, arXiv 2203.11171). Answers are compared after
normalisation: numbers by value, programs by syntax tree, other texts without case and spacing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from fractions import Fraction

from bass_cli.rank.static import bare_program

_BOXED = "\\boxed{"
_HASHES = re.compile(r"####[ \t]*([^\n]+)")  # the mark of GSM8K's solutions
# A number with an optional currency, thousands separators and percent sign. At most 100 digits,
# because longer ones are no answers and Python refuses thousands of digits.
_NUMBER = re.compile(
    r"([-+]?)[$€£]?\s*(\d{1,3}(?:,\d{3}){1,33}|\d{1,100})(?:\.(\d{0,100}))?\s*(%?)", re.ASCII
)
_FRACTION = re.compile(r"([-+]?\d{1,100})\s*/\s*(\d{1,100})", re.ASCII)

Answer = tuple[str | None, str | None, str]  # the answer, the program and the whole text


def votes(answers: Iterable[Answer]) -> list[float]:
    """Return for each sample the share of samples with an equal answer.

    A sample without an answer gets 0, and its vote counts for no other sample.

    Args:
        answers: The extracted answer if there is one, else the program (empty if the sample has
            none that is whole), else the whole text.
    """
    keys = [_key(*one) for one in answers]
    counts = Counter(key for key in keys if key is not None)
    return [0.0 if key is None else counts[key] / len(keys) for key in keys]


def _key(answer: str | None, program: str | None, text: str) -> Hashable:
    """Return what equal answers have in common; None without an answer."""
    if answer is None and program is not None:
        return bare_program(program) or None
    return normalised(found_in(text) if answer is None else answer)


def found_in(text: str) -> str:
    r"""Return the answer that a text marks: after the last `####` (GSM8K), or in the last `\boxed`.

    Without a mark it is the whole text.
    """
    boxed = text.rfind(_BOXED)
    marked = list(_HASHES.finditer(text))
    if marked and marked[-1].start() > boxed:
        return marked[-1][1]
    if boxed < 0:
        return text
    start, depth = boxed + len(_BOXED), 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start:at]
    return text[start:]


def normalised(answer: str) -> Hashable:
    """Return a key that equal answers share; None if the answer is empty.

    Numbers are compared by value: "1,200", "$1200.00" and "1200." are equal, and so are "1/2" and
    "0.5". A percent sign is kept, because 50 % is not 50. Other texts are compared without case,
    surrounding punctuation and repeated spaces.
    """
    bare = answer.strip().strip("*`").removesuffix(".").strip()
    if found := _NUMBER.fullmatch(bare):
        sign, digits, decimals, percent = found.groups()
        value = Fraction(f"{sign}{digits.replace(',', '')}.{decimals or 0}")
        return value, percent
    if (found := _FRACTION.fullmatch(bare)) and int(found[2]):
        return Fraction(int(found[1]), int(found[2])), ""
    return " ".join(bare.casefold().split()).strip(".,;:!?\"'()[] ") or None
