"""Compare answers with the right ones: normalised texts, numbers and letters of choices."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import deque
from fractions import Fraction

from bass_cli.eval.tasks.task_file import Choice, Exact, Numeric

_ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
# Digits with commas are matched as one, so that no text takes quadratic time. A sign counts only if
# no number, word or bracket ends right before it: "10-3" is 10 and 3.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]])[-+\u2212])?(?:\\?[$\u20ac\u00a3]\s?(?P<second>[-\u2212])?)?"
    r"(?P<whole>[0-9][0-9,]*|(?=\.[0-9]))(?P<places>\.[0-9]+)?"
    r"(?P<power>[eE][-+]?[0-9]{1,3}(?![0-9]))?\s?(?P<percent>\\?%)?"
)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_MOST_DIGITS = 1000  # of a number; a longer one is no answer, and takes quadratic time
_AFTER_WORD = r"(?i:answers?|choice|option)\b[^A-Za-z0-9]*(?:(?i:is|would be)\b[^A-Za-z0-9]*)?"


def normalised(text: str, how: Exact) -> str:
    """Return a text in the form in which equal answers are equal."""
    text = unicodedata.normalize("NFC", text)
    if how.ignore_case:
        text = text.casefold()
    if how.ignore_punctuation:
        text = text.translate(str.maketrans("", "", string.punctuation))
    if how.ignore_articles:
        text = _ARTICLES.sub(" ", text)
    return " ".join(text.split())


def number_in(text: str, how: Numeric) -> Fraction | None:
    """Return the first or last number of a text, exactly. None if there is none.

    Commas between thousands and a currency sign are left out.
    """
    every = _NUMBER.finditer(text)
    found = next(every, None) if how.match == "first" else next(iter(deque(every, 1)), None)
    if found is None:
        return None
    digits, places = found["whole"].rstrip(","), found["places"] or ""
    negative = found["sign"] in ("-", "\u2212") or found["second"] is not None
    if _GROUPED.fullmatch(digits):
        digits = digits.replace(",", "")
    elif "," in digits:  # a list of numbers without spaces
        before, _, after = digits.partition(",") if how.match == "first" else digits.rpartition(",")
        digits, places = (before, "") if how.match == "first" else (after, places)
        negative = negative and how.match == "first"
    if len(digits) + len(places) > _MOST_DIGITS:
        return None
    value = Fraction((digits or "0") + places + (found["power"] or ""))
    value = -value if negative else value
    return value / 100 if found["percent"] and how.percent == "fraction" else value


def decimal(number: Fraction) -> str:
    """Return a number of `number_in` as a decimal fraction, exactly, without trailing zeros."""
    places = 0
    while 10**places % number.denominator:
        places += 1
    digits = str(abs(number.numerator) * 10**places // number.denominator).rjust(places + 1, "0")
    whole, rest = digits[: len(digits) - places], digits[len(digits) - places :]
    return ("-" if number < 0 else "") + whole + ("." + rest if rest else "")


def are_close(number: Fraction, right: Fraction, how: Numeric) -> bool:
    """Return whether a number equals the right one within the larger tolerance, exactly."""
    share = Fraction(str(how.relative_tolerance)) * abs(right)
    return abs(number - right) <= max(Fraction(str(how.tolerance)), share)


def letter_in(text: str, how: Choice) -> str | None:
    """Return the letter of the choice in a text. None if there is none.

    In this order: the last letter after "answer", "choice" or "option"; a letter at the start; the
    last letter alone, in brackets or before punctuation; a text that is only the letter.
    """
    letter = rf"([{how.letters}])"
    alone = r"(?![\w'])"
    # The letter A before a word is an article.
    ended = r"(?=\s*(?:$|[).:,;\]*\n]))"
    rules = (
        rf"{_AFTER_WORD}{letter}{alone}",
        rf"\A[^\w]*{letter}{ended}",
        rf"(?<![\w'])(?:[(\[*]\s*)?{letter}{ended}",
    )
    for number, rule in enumerate(rules):
        found = re.findall(rule, text)
        if found:
            return str(found[0 if number == 1 else -1])
    bare = re.sub(r"[\W_]", "", text).upper()
    return bare if len(bare) == 1 and bare in how.letters else None
