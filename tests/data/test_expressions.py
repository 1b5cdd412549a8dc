"""Expressions of `bass filter --where`: values against Python's own, errors with columns, and what
is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bass_cli.data.expressions import NoValueError, compile_expression, read_key
from bass_cli.errors import UserError

ROW: dict[str, Any] = {
    "text": "Hello wörld",
    "finish_reason": "eos",
    "tokens": 7,
    "mean_logprob": -0.25,
    "error": None,
    "done": True,
    "meta": {"level": 2, "the kind": "x", "tags": ["a", "b"]},
    "odd key": 3,
}


def value(text: str, row: dict[str, Any] = ROW) -> bool:
    return compile_expression(text)(row)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('finish_reason == "eos" and mean_logprob > -0.5', True),
        ("tokens >= 8 or not done", False),
        ("3 < tokens < 8", True),
        ("tokens % 2 == 1 and tokens // 2 == 3 and -tokens + 1 < 0", True),
        ("mean_logprob * tokens / 7 == -0.25", True),
        ('finish_reason in ("eos", "stop") and finish_reason not in ["length"]', True),
        ('"ello" in text and len(text) == 11 and lower(text) == "hello wörld"', True),
        (r'matches(text, r"^hello\b") or matches(lower(text), "^hello")', True),
        ('meta.level == 2 and meta["the kind"] == "x" and meta.tags[-1] == "b"', True),
        ('"level" in meta and len(meta.tags) == 2 and key("odd key") == 3', True),
        ("has(meta.level) and not has(meta.size) and not has(error) and not has(no.such)", True),
        ("error == null and error != 0 and done == true and done != 1", True),
        ("  tokens\n > 3", True),
        ('"#" in text or "ello" in text  ', True),
        ("done not in [[1]] and [done] == [true] and [done] != [1] and 7.0 in [tokens]", True),
        ("true and True and not false and None == null", True),
    ],
)
def test_values_are_those_of_the_documented_language(text: str, expected: bool) -> None:
    assert value(text) is expected


NUMBERS = st.integers(-9, 9) | st.floats(-9, 9, allow_nan=False).map(lambda x: round(x, 2))


@settings(max_examples=150, deadline=None)
@given(NUMBERS, NUMBERS, NUMBERS, st.sampled_from("+-*/"), st.sampled_from(["<", "<=", ">", "=="]))
def test_arithmetic_and_comparisons_equal_python(
    x: float, y: float, z: float, sign: str, compare: str
) -> None:
    text = f"x {sign} y {compare} z or not (z - x {compare} y)"
    row = {"x": x, "y": y, "z": z}
    try:
        expected = eval(text, {}, dict(row))
    except ZeroDivisionError:
        with pytest.raises(NoValueError, match="division by 0"):
            value(text, row)
        return
    assert value(text, row) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('finish_reson == "eos"', '`where` column 1: .* no key "finish_reson"; did you mean "fini'),
        ('"ö" in text and tokns > 1', 'column 17: .*did you mean "tokens"'),
        ("meta.levl == 2", 'meta has no key "levl"; did you mean "level"'),
        ("  error > 1", "column 3: the value is null"),
        ("meta.tags[2] == 1", "meta.tags has no place 2"),
        ("has(error) or error.kind == 1", "error is no object"),
    ],
)
def test_a_missing_value_names_column_and_nearest_key(text: str, message: str) -> None:
    with pytest.raises(NoValueError, match=message) as found:
        value(text)
    assert found.value.missing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens", "column 1: the expression must be true or false, not 7"),
        ("done and tokens", "column 10: a side of and must be true or false"),
        ("text > 3", "> compares two numbers or two texts, not 'Hello wörld' and 3"),
        ("done + 1 == 2", "a number is needed beside \\+, not True"),
        ("text.size == 1", "text is no object"),
        ("len(tokens) == 1", r"len\(\) needs a text, a list or an object, not 7"),
        ("1 in text", "only a text is in a text"),
        ("tokens in done", "in needs a list"),
        ("tokens / (tokens - 7) > 1", "division by 0"),
        (f"{10**300} * {10**300} > 1", "too large"),
    ],
)
def test_a_value_of_another_type_is_an_error_and_not_missing(text: str, message: str) -> None:
    with pytest.raises(NoValueError, match=message) as found:
        value(text)
    assert not found.value.missing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("   ", "it is empty"),
        ('finish_reason = "eos"', "column 1"),
        ("tokens >", "no valid expression"),
        (
            'tokens > 1 and __import__("os")',
            "column 16: there is no function __import__; known: len",
        ),
        ("lenn(text) > 1", 'did you mean "len"'),
        ("text.upper() == 1", "there is no function text.upper"),
        ("(lambda: 1)() == 1", "there is no function"),
        ("[x for x in text] == 1", "is not allowed"),
        ('f"{text}" == 1', "is not allowed"),
        ("(x := 3) == 3", "is not allowed"),
        ("tokens if done else 1", "is not allowed"),
        ("text[0:1] == 1", "write a key as"),
        ("tokens ** 9 > 1", "only \\+ - "),
        ("b'a' == text", "is no number and no text"),
        ("1j == tokens", "is no number and no text"),
        ("tokens is 7", "use == or !="),
        ("~tokens > 1", "use not"),
        ("len(text, 1) > 1", r"len\(\) takes 1 value, not 2"),
        ("len(*text) > 1", "takes values only"),
        ("has(1)", r"has\(\) takes a key"),
        ("key(text) == 1", r"key\(\) takes a name in quotes"),
        ("matches(text, text)", "must be a text in quotes"),
        ("tokens > 1 # and done", "column 12: # begins a comment"),
        ("  tokens > 1 # a\n and done", "column 14: # begins a comment"),
        ('matches(text, "(?:(?:a{99}){99}){99}")', "column 15: .* more than 100000 copies"),
        (f'matches(text, "a{{{10**9}}}")', "more than 100000 copies"),
        ('matches(text, "a(?R)?b")', "a pattern that contains itself"),
        ('matches(text, "(?<x>a(?&x)?b)")', "a pattern that contains itself"),
        ('matches(text, "(")', "column 15: the regex is not valid: missing"),
        (r'matches(text, "\bword")', 'write a regex with a backslash as r"'),
        (f'matches(text, "{"a" * 1001}")', "more than 1000 characters"),
        ("not " * 4_000 + "done", "more than 10000 characters"),
        ("-" * 3_000 + "1 == 1", "more than 1000 parts|nested too deep|too many nested|complex"),
        ("(" * 900 + "1" + ")" * 900 + " == 1", "too many nested|nested too deep"),
        ("9" * 5_000 + " == 1", "column 1|too long"),
    ],
)
def test_refused_expressions_name_the_column(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compile_expression(text)


def test_no_attribute_of_a_python_object_is_reached() -> None:
    for text in ("text.__class__ == 1", "meta.keys == 1", "meta.__class__.__mro__ == 1"):
        with pytest.raises(NoValueError, match=r"no object|no key"):
            value(text)


def test_deep_values_are_compared() -> None:
    deep: Any = [1]
    for _ in range(100_000):
        deep = [deep]
    row = {"a": deep, "b": [deep], "c": {"x": [1, {"y": True}]}, "d": {"x": [1, {"y": 1}]}}
    assert value("a != b and [a] == b and c == c and c != d and a in b", row)


def test_a_regex_that_backtracks_ends_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bass_cli.data.expressions.PATIENCE", 0.1)
    began = time.monotonic()
    with pytest.raises(NoValueError, match=r"column 15: the regex takes more than 0\.1 s"):
        value('matches(text, "(a|aa)+$")', {"text": "a" * 80 + "b"})
    assert time.monotonic() - began < 5


def test_a_key_of_an_option_is_a_path() -> None:
    assert read_key("meta.tags[0]", "key")(ROW) == "a"
    assert read_key('key("odd key")', "key")(ROW) == 3
    for text in ("", "1", "text + 1", "len(text)", "a b", "meta."):
        with pytest.raises(UserError, match="write a key"):
            read_key(text, "key")
