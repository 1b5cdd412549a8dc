"""Find the answer in a model's text by the rules of a task file.

A child process with limits does it, because the rules are regular expressions of a user and the
texts are a model's: some pairs of them take exponential time.
"""

from __future__ import annotations

import functools
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bass_cli.eval.tasks.task_file import Extract
from bass_cli.formats.limits import Limited, RefusalError
from bass_cli.rank.code import blocks_in, code_in, without_thoughts

# CPU seconds and bytes for one text; a usual one takes a tenth of a millisecond
_SECONDS, _MEMORY = 10.0, 1 << 30
# Languages whose code is chosen by the function that it defines
_PYTHON = ("python", "py", "python3")


class SlowRuleError(ValueError):
    """A rule that exceeded its limits on a text; the text is the reason."""


class _Case(NamedTuple):
    """A text, the rules, and the name of the function that code must define."""

    rules: tuple[Extract, ...]
    text: str
    name: str | None


class Finder:
    """Finds answers and matches patterns in a child process."""

    def __init__(self) -> None:
        import markdown_it  # before the child is forked

        del markdown_it
        self._call = Limited(_run, seconds=_SECONDS, memory=_MEMORY)
        # The check and the ranking of a sample ask for the same answer.
        self._found = functools.lru_cache(maxsize=4096)(self._find)
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
        return self._found(_Case(tuple(rules), text, name))

    def _find(self, case: _Case) -> str | None:
        found: str | None = self._ask("find", case)
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
