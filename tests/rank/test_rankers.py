"""Rankers without a model: what they score, and the order that follows."""

import pytest

from bass_cli.errors import UserError
from bass_cli.rank.code import bare_program, checks_passed, parse, undefined_names
from bass_cli.rank.ranking import (
    Candidate,
    Group,
    best_first,
    found_in,
    needs_model,
    normalised,
    parse_rankers,
    ranker_without_model,
    votes,
)

HEAD = 'def total(numbers):\n    """Return the sum.\n\n    >>> total([1, 2])\n    3\n    """\n'


def scores_of(name, *candidates, entry_point=None):
    (found,) = ranker_without_model(name).scores([Group("a", HEAD, candidates, entry_point)])
    return list(found)


def code(body, *, reason="eos", sample=0, logprob=None):
    return Candidate(sample, body, reason, logprob, HEAD + body)


@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("import math\nprint(math.pi, len([]))", set()),
        ("print(math.pi)", {"math"}),
        ("def f(x: List[int]) -> Foo: pass", {"List", "Foo"}),
        ("from __future__ import annotations\ndef f(x: List) -> Foo:\n    y: Bar = x\n", set()),
        ("def f():\n    x: NoSuch = 1\n    return x", set()),
        ("class A:\n    x: NoSuch = 1", {"NoSuch"}),
        ("def f():\n    return g()\ndef g(): pass", set()),
        ("def f():\n    def g(): return x\n    x = 1\n    return g", set()),
        ("class A:\n    x = 1\n    def f(self): return x", {"x"}),
        ("[i for i in range(3)]\nprint(i)", {"i"}),
        ("def f():\n    global x\n    x = 1\nprint(x)", set()),
        ("try:\n    pass\nexcept ValueError as error:\n    print(error)", set()),
        ("with open('x') as (a, b): print(a, b)\nfor k in (): print(k)\nelse: print(k)", set()),
        ("f = lambda x, *y, z=w: (x, y, z)", {"w"}),
        ("from math import *\nprint(sin(1))", set()),
        ("import os.path\nprint(os, path)", {"path"}),
        ("print((n := 3), n)", set()),
        ("def f():\n    return [a for a in b if (c := a)], c", {"b"}),
        ("class A:\n    def f(self): return __class__, super().f", set()),
        ("print(__name__, __file__)", set()),
        ("def f():\n    x += 1\n    return x", set()),
        (
            "match [1]:\n    case [first, *rest]: print(first, rest)\n    case Point(): pass",
            {"Point"},
        ),
    ],
)
def test_undefined_names_are_those_of_no_scope(program, names):
    assert undefined_names(parse(program)) == names


def test_undefined_names_raise_name_errors_in_python():
    """Python itself is the reference: a call of each function either raises NameError or not."""
    bodies = ["return y", "y = 1; return y", "return [y for y in (1, 2)]", "return max(y for x in [1])",
              "import json as y; return y", "return (lambda y: y)(1)", "return len"]  # fmt: skip
    for body in bodies:
        program, scope = f"def f():\n    {body}\n", {}
        exec(program, scope)
        try:
            scope["f"]()
            fails = False
        except NameError:
            fails = True
        assert bool(undefined_names(parse(program))) == fails, body


def test_static_counts_checks():
    whole = code("    return sum(numbers)\n")
    assert scores_of("static", whole, entry_point="total") == [4]
    assert scores_of("static", whole._replace(finish_reason="length"), entry_point="total") == [3]
    assert scores_of("static", whole._replace(finish_reason=None), entry_point="total") == [4]
    assert scores_of("static", code("    return add(numbers)\n"), entry_point="total") == [3]
    assert scores_of("static", whole, entry_point="other") == [3]
    assert scores_of("static", code("    return sum(numbers"), entry_point="total") == [1]
    assert scores_of("static", Candidate(0, "no code", "length")) == [0]


@pytest.mark.parametrize(
    ("program", "defines"),
    [
        (HEAD, False),
        (HEAD + "    pass\n", False),
        (HEAD + "    ...\n", False),
        (HEAD + "    return 1\n", True),
        (HEAD + "    return 1\n" + HEAD, False),
        (HEAD + "    pass\n" + HEAD + "    return 1\n", True),
        ("total = lambda numbers: 1", True),
        ("class total:\n    x = 1", True),
        ("def other():\n    def total(): return 1", False),
    ],
)
def test_entry_point_needs_a_body_at_the_top_level(program, defines):
    assert (checks_passed(program, "eos", "total") == 4) == defines


@pytest.mark.parametrize(
    "program", ["return 1", "def f(:", "x = '\0'", "(" * 5000, "def f(a, a): pass", "f() = 1"]
)
def test_programs_that_python_refuses_do_not_parse(program):
    assert parse(program, compiles=True) is None
    assert checks_passed(program, "eos", None) == 1
    assert bare_program(program) is None


def test_static_ties_are_broken_by_log_probability():
    candidates = [
        code("    return add(1)\n", sample=0, logprob=-0.1),
        code("    return sum(numbers)\n", sample=1, logprob=-0.9),
        code("    return sum(numbers or ())\n", sample=2, logprob=-0.5),
    ]
    scores = scores_of("static", *candidates, entry_point="total")
    assert best_first(candidates, scores) == [2, 1, 0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,200", "$1200.00"), ("42", " 42. "), ("0.5", "1/2"), ("-3", "-3.0"), ("**7**", "7"),
        ("50 %", "50%"), ("Paris", "paris."), ("a  b\nc", "A b c"), ("(B)", "b"), ("`x`", "x"),
    ],
)  # fmt: skip
def test_equal_answers_have_one_key(one, other):
    assert normalised(one) == normalised(other) is not None


@pytest.mark.parametrize(
    ("one", "other"), [("50%", "50"), ("1,20", "120"), ("1/0", "1"), ("3", "-3"), ("x", "y")]
)
def test_different_answers_have_different_keys(one, other):
    assert normalised(one) != normalised(other)


def test_marked_answers_are_found():
    assert found_in("so 6 * 7\n#### 42\n").strip() == "42"
    assert found_in(r"first \boxed{1}, no: \boxed{\frac{1}{2}} done") == r"\frac{1}{2}"
    assert found_in("#### 3 and then \\boxed{4}") == "4"
    assert found_in("\\boxed{4} and\n#### 3") == "3"
    assert found_in("plain") == "plain"


def test_majority_counts_equal_answers():
    texts = ["#### 12", "so #### 12.0", "#### 13", "#### $1,2", ""]
    assert votes([(None, None, text) for text in texts]) == [0.4, 0.4, 0.2, 0.2, 0.0]
    assert votes([("7", None, "x"), ("8", None, "x"), ("7.0", None, "y")]) == [2 / 3, 1 / 3, 2 / 3]


def test_majority_of_programs_ignores_comments_docstrings_and_layout():
    same = ["    return sum(numbers)\n", "    # add\n    return (sum( numbers ))\n"]
    programs = [code(one) for one in [*same, "    return 0\n"]]
    assert scores_of("majority", *programs) == [2 / 3, 2 / 3, 1 / 3]


def test_programs_without_a_body_have_no_vote():
    bodies = ["    pass\n", "    pass\n", "    return sum(numbers\n", "    return sum(numbers)\n"]
    scores = scores_of("majority", *map(code, bodies), entry_point="total")
    assert scores == [0, 0, 0, 0.25]


def test_logprob_order_is_that_of_the_paper():
    candidates = [Candidate(at, "", mean_logprob=one) for at, one in enumerate([-2, None, -1, -1])]
    scores = scores_of("logprob", *candidates)
    assert scores == [-2, None, -1, -1]
    assert best_first(candidates, scores) == [2, 3, 0, 1]


def test_missing_scores_come_last():
    candidates = [Candidate(at, "") for at in range(4)]
    assert best_first(candidates, [None, float("nan"), -5.0, 0.0]) == [3, 2, 0, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("logprob,statik", 'did you mean "static"'),
        ("", "known: logprob"),
        ("static,static", "given twice"),
        ("reward:", "reward"),
        ("reward:MODEL", "in place of MODEL"),
    ],
)
def test_wrong_names_are_refused(text, said):
    with pytest.raises(UserError, match=said):
        parse_rankers(text, "`by`")


def test_names_are_read_in_order():
    names = parse_rankers("static, logprob,reward:some/model", "`by`")
    assert names == ["static", "logprob", "reward:some/model"]
    assert [needs_model(one) for one in names] == [False, False, True]


def test_groups_have_no_place_for_tests():
    """What a ranker gets has exactly these fields, and none holds tests."""
    assert Group._fields == ("id", "prompt", "candidates", "entry_point")
    assert Candidate._fields == (
        "sample", "text", "finish_reason", "mean_logprob", "program", "answer"
    )  # fmt: skip


def test_rankers_run_no_code(tmp_path):
    """A program that would write a file is parsed only."""
    path = tmp_path / "trace"
    body = f"    return 1\nopen({str(path)!r}, 'w')\n"
    for name in ("static", "majority"):
        scores_of(name, code(body), entry_point="total")
    assert not path.exists()
