"""Find the answer in a model's text by the rules of a task file, and compare it with the right one.

A child process with limits finds it, because the rules are regular expressions of a user and the
texts are a model's: some pairs of them take exponential time. Normalised texts, numbers and letters
of choices are compared.
"""

from __future__ import annotations

import functools
import json
import re
import string
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from bass_cli.eval.tasks.task_file import Choice, Exact, Extract, Numeric
from bass_cli.formats.limits import Limited, RefusalError
from bass_cli.rank.code import blocks_in, code_in, without_thoughts

# CPU seconds and bytes for one text; a usual one takes a tenth of a millisecond
_SECONDS, _MEMORY = 10.0, 1 << 30
# Languages whose code is chosen by the function that it defines
_PYTHON = ("python", "py", "python3")
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


class SlowRuleError(ValueError):
    """A rule that exceeded its limits on a text; the text is the reason."""


class Finder:
    """Finds answers and matches patterns in a child process."""

    def __init__(self) -> None:
        import markdown_it  # before the child is forked

        del markdown_it
        self._call = Limited(_run, seconds=_SECONDS, memory=_MEMORY)
        # The check and the ranking of a sample need the same answer.
        self._found = functools.lru_cache(maxsize=4096)(functools.partial(self._ask, "find"))
        self.find((), "")  # fork now, because a process with a model on a GPU is slow to fork

    def find(self, rules: Sequence[Extract], text: str, name: str | None = None) -> str | None:
        """Return the answer by the first rule that finds one, without white space at its ends.

        Text up to `</think>` is left out. Without rules it is the whole text.

        Args:
            rules: in order.
            text: a model's text.
            name: the function that a block of Python must define.

        Raises:
            SlowRuleError: a rule exceeded its limits.
        """
        found: str | None = self._found((tuple(rules), text, name))
        return found

    def matches(self, pattern: str, text: str, *, whole: bool) -> bool:
        """Return whether a pattern matches all of a text, or (not `whole`) a part of it.

        SlowRuleError if the pattern exceeded its limits.
        """
        return bool(self._ask("match", (pattern, text, whole)))

    def _ask(self, kind: str, argument: Any) -> Any:
        try:
            return json.loads(self._call((kind, argument)))
        except RefusalError as error:
            raise SlowRuleError(str(error)) from None


def _run(request: tuple[str, Any]) -> bytes:
    """Answer a request of Finder as JSON; runs in the child process."""
    kind, argument = request
    if kind == "match":
        pattern, text, whole = argument
        compiled = re.compile(pattern)
        return json.dumps(bool((compiled.fullmatch if whole else compiled.search)(text))).encode()
    return json.dumps(_answer(*argument)).encode()


def _answer(rules: Sequence[Extract], text: str, name: str | None) -> str | None:
    text = without_thoughts(text)
    if not rules:
        return text.strip()
    found = (_by_rule(rule, text, name) for rule in rules)
    return next((one for one in found if one is not None), None)


def _by_rule(rule: Extract, text: str, name: str | None) -> str | None:
    """Return the answer by one rule. Code keeps its indentation. None if there is none."""
    if rule.code is not None:
        return _code(rule, text, name)
    if rule.regex is not None:
        found = _chosen(re.finditer(rule.regex, text), rule)
        group = rule.group if rule.group is not None else min(1, re.compile(rule.regex).groups)
        value = None if found is None else found[group]
    elif rule.after is not None:
        at = text.find(rule.after) if rule.match == "first" else text.rfind(rule.after)
        rest = text[at + len(rule.after) :].strip()
        value = None if at < 0 else rest.split(rule.until, 1)[0] if rule.until else rest
    else:
        value = _chosen(_values(str(rule.json_key).split("."), text), rule)
    return None if value is None else value.strip()


def _chosen(found: Iterator[Any], rule: Extract) -> Any:
    """Return the first or the last of several; the last by default. None if there is none."""
    return next(found, None) if rule.match == "first" else next(iter(deque(found, 1)), None)


def _code(rule: Extract, text: str, name: str | None) -> str | None:
    """Return a block of code. Python is found in a text without blocks too."""
    if str(rule.code).lower() in _PYTHON and rule.match is None:
        return code_in(text, name)
    wanted = _PYTHON if str(rule.code).lower() in _PYTHON else (str(rule.code).lower(),)
    blocks = [
        block.text
        for block in blocks_in(text)
        if rule.code == "any" or block.language.lower().split(" ")[0] in wanted
    ]
    return blocks[-1 if rule.match == "last" else 0] if blocks else None


def _values(path: Sequence[str], text: str) -> Iterator[str]:
    """Yield the values at a path of keys in the JSON objects of a text, as text.

    Objects inside of another object are not searched.
    """
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                yield value if isinstance(value, str) else json.dumps(value)
        at = text.find("{", end)


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
