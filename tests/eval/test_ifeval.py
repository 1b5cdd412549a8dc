"""IFEval: which responses follow which instructions, by the published definitions."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in

from bass_cli.errors import MachineError, UserError
from bass_cli.eval.tasks import ifeval, load_task
from bass_cli.eval.tasks.ifeval import INSTRUCTIONS, follows, follows_loosely

# instruction, arguments, responses that follow it, responses that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, ["A Cat and dogs"], ["A cat", "do g cat"]),
    (
        "keywords:frequency",
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        ["cat, CATS"],
        ["cat"],
    ),
    (
        "keywords:frequency",
        {"keyword": "cat", "frequency": 2, "relation": "less than"},
        ["cat", "dog"],
        ["cat cat"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat"]},
        ["cats", "concat"],
        ["a CAT.", "cat"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "A", "let_frequency": 3, "let_relation": "at least"},
        ["aAa"],
        ["aA b"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 1, "let_relation": "less than"},
        ["a"],
        ["#"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["one two-three"],
        ["don't"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        ["one, two!"],
        ["a b c"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na***b\n***"],
        ["a", "a***b***c", "a\n***\n\n***\nb"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Hello"},
        ["a\n\nhello there", "a\n\n'HELLO! b", "a\n\n\"hello's b"],
        ["hello\n\na", "a\n\nhelloo", "a\n\nb\n\nhello", "a\nhello", "\n\nhello"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] [b c]"],
        ["[a]", "[a\n]", "[[a]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["a\nP.S. b", "p. s. b"],
        ["P.S b", "PS: b"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a\nP. P.S b"], ["P.S. b"]),
    ("detectable_content:postscript", {"postscript_marker": "Note:"}, ["a\nnote: b"], ["a"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n- b", "text\n  * a\n* b"],
        ["* a", "** a\n* b", "* a\n* b\n* c"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["Well. My answer is no."],
        ["my answer is no.", "No."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b c*", "**a** x **b**"],
        ["*a*", "* * *a", "*a\nb*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        ["Part 1\na\nPart 2\nb"],
        ["Part 1\na", "part 1 part 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', "```json\n[1]\n```", " 3 "],
        ["{a: 1}", 'Here: {"a": 1}', "[" * 100_000],
    ),
    (
        "detectable_format:title",
        {},
        ["<<a title>>\ntext"],
        ["<<>>", "<title>", "<< >>", "<<a\nb>>"],
    ),
    (
        "combination:two_responses",
        {},
        ["a******b", "******a\n******\nb"],
        ["a", "a******a", "a******b******c", "a************b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say hi. "},
        [" SAY HI. Hi!"],
        ["Hi! Say hi."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "The end."},
        ['a. the END."', "the end."],
        ["The end. Bye"],
    ),
    ("startend:quotation", {}, [' "a" '], ['"a', '"', "'a'"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]
WITH_PACKAGES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "at least"},
        ["DON'T GO", "A B. C"],  # DO, N'T, GO
        ["NASA ESA", "Nasa Esa Jaxa"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Das ist ein deutscher Satz mit Wörtern."],
        ["This is an English sentence."],
    ),
    (
        "change_case:english_capital",
        {},
        ["THIS IS AN ENGLISH SENTENCE."],
        ["THIS is an English sentence.", "DAS IST EIN DEUTSCHER SATZ."],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["this is an english sentence."],
        ["This is.", "das ist ein deutscher satz."],
    ),
]


def check(name: str, given: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    for response in right:
        assert follows(name, response, given), response
    for response in wrong:
        assert not follows(name, response, given), response


@pytest.mark.parametrize(("name", "given", "right", "wrong"), CASES)
def test_responses_follow_by_the_published_definition(
    name: str, given: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    check(name, given, right, wrong)
    assert not follows(name, " \n", given), "a blank response follows nothing"


@pytest.mark.parametrize(("name", "given", "right", "wrong"), WITH_PACKAGES)
def test_responses_follow_by_langdetect_and_nltk(
    name: str, given: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    for package in INSTRUCTIONS[name].packages:
        pytest.importorskip(package)
    check(name, given, right, wrong)
    assert [follows(name, right[0], given) for _ in range(5)] == [True] * 5


def test_sentences_are_counted_by_punkt() -> None:
    pytest.importorskip("nltk")
    try:
        ifeval._sentences()
    except LookupError:
        pytest.skip("NLTK's data punkt_tab is not installed")
    name, given = (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
    )
    check(name, given, ["Dr. No came. He left! Why?"], ["Dr. No came. He left!"])


def test_all_25_kinds_of_the_paper_are_here() -> None:
    assert len(INSTRUCTIONS) == 25
    covered = {case[0] for case in (*CASES, *WITH_PACKAGES)}
    assert covered | {"length_constraints:number_sentences"} == set(INSTRUCTIONS)


def published(name: str, response: str, number: int) -> bool:
    """Return the result of a check by its published regular expressions."""
    if name == "detectable_content:number_placeholders":
        return len(re.findall(r"\[.*?\]", response)) >= number
    if name == "detectable_content:postscript":
        return bool(re.findall(r"\s*p\.\s?s\..*$", response.lower(), flags=re.MULTILINE))
    if name == "detectable_format:number_bullet_lists":
        stars = re.findall(r"^\s*\*[^\*].*$", response, flags=re.MULTILINE)
        dashes = re.findall(r"^\s*-.*$", response, flags=re.MULTILINE)
        return len(stars) + len(dashes) == number
    found = re.findall(r"<<[^\n]+>>", response)
    return any(one.lstrip("<").rstrip(">").strip() for one in found)


LINEAR = {
    "detectable_content:number_placeholders": "[] a\n",
    "detectable_content:postscript": "Ps. \n",
    "detectable_format:number_bullet_lists": "*- a\n",
    "detectable_format:title": "<> a\n",
}


@pytest.mark.parametrize("name", LINEAR)
def test_checks_in_linear_time_have_the_published_results(name: str) -> None:
    """A response may be one character to its end, such as newlines or opening brackets."""
    generator, number = random.Random(0), 2
    given = {"num_placeholders": number, "num_bullets": number, "postscript_marker": "P.S."}
    results = set()
    for _ in range(3000):
        response = "x" + "".join(generator.choices(LINEAR[name], k=generator.randrange(14)))
        results.add(follows(name, response, given))
        assert follows(name, response, given) == published(name, response, number), response
    assert results == {True, False}
    start = time.process_time()
    for one in "[<*- \n":
        follows(name, "x" + 100_000 * one, given)
    assert time.process_time() - start < 2, "seconds; the published expressions take ten"


def test_loose_accuracy_forgives_introductions_remarks_and_emphasis() -> None:
    """The variants of the paper: without the first line, the last line, both, and asterisks."""
    for response in (
        'Sure:\n{"a": 1}',
        '{"a": 1}\nBye',
        'Sure:\n{"a": 1}\nBye',
        'Sure:\n**{"a": 1}**\nBye',
    ):
        assert not follows("detectable_format:json_format", response, {})
        assert follows_loosely("detectable_format:json_format", response, {})
    assert not follows_loosely("detectable_format:json_format", 'Sure:\nso\n{"a": 1}', {})
    assert not follows_loosely("punctuation:no_comma", "", {})


ROWS = [
    {
        "key": 7,
        "prompt": "Write. No commas. Two bullets.",
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:number_bullet_lists"],
        # the hub's files have the arguments of all kinds
        "kwargs": [{"num_bullets": None}, {"num_bullets": 2.0, "relation": None}],
    },
    {
        "key": 8,
        "prompt": "A title.",
        "instruction_id_list": ["detectable_format:title"],
        "kwargs": [{}],
    },
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_report_has_strict_and_loose_accuracy_of_prompts_and_instructions(tmp_path: Path) -> None:
    data = write(tmp_path / "ifeval.jsonl", ROWS)
    samples = [
        ("7", 0, "* a\n* b", -0.1, "eos"),  # both
        ("7", 1, "Well, then\n* a\n* b", -0.3, "eos"),  # one; both without its first line
        ("8", 0, "<think>\na title, a title\n</think>\n<<a>>", -0.2, "eos"),
        ("8", 1, "", -0.1, "error"),
    ]
    rows = [
        {
            "task_id": key,
            "sample": sample,
            "text": text,
            "mean_logprob": score,
            "finish_reason": reason,
        }
        for key, sample, text, score, reason in samples
    ]
    path = write(tmp_path / "samples.jsonl", rows)
    result = cli("score", path, "--task", "ifeval", "--data", data, "--json", code=0)
    report = json.loads(result.stdout)
    assert (report["pass_first"], report["statuses"]) == (
        1.0,
        {"failed": 1, "not finished": 1, "passed": 2},
    )
    found = report["instructions"]
    assert (found["strict"]["prompt"], found["strict"]["instruction"]) == (2 / 4, 4 / 6)
    assert (found["loose"]["prompt"], found["loose"]["instruction"]) == (3 / 4, 5 / 6)
    assert found["strict"]["by_kind"] == {
        "detectable_format:number_bullet_lists": 1.0,
        "detectable_format:title": 0.5,
        "punctuation:no_comma": 0.5,
    }
    assert "prompt 50.0 %, instruction 66.7 %" in result.stderr
    verdicts = rows_in(f"{path}.verdicts.jsonl")
    assert [row["detail"] for row in verdicts] == [
        "",
        "1 of 2 not followed: punctuation:no_comma",
        "",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": []}, r'f.jsonl:1: field "kwargs": it has 0 entries for 1 instructions'),
        ({"kwargs": [1]}, r'f.jsonl:1: field "kwargs": a list of objects is needed'),
        ({"kwargs": [{"x": 1}]}, r'f.jsonl:1: field "kwargs": detectable_format:title has no argument "x"'),
        ({"instruction_id_list": ["detectable_format:titel"]}, r'there is no "detectable_format:titel"; did you mean'),
        ({"instruction_id_list": ["keywords:existence"]}, r'keywords:existence needs the argument "keywords"'),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["a("]}]},
            r'keywords:existence, argument "keywords": a regular expression is needed',
        ),
        (
            {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 3, "relation": "most"}]},
            r'argument "relation": "less than" or "at least" is needed',
        ),
    ],
)  # fmt: skip
def test_invalid_data_is_an_error_that_names_line_and_argument(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = write(tmp_path / "f.jsonl", [ROWS[1] | change])
    with pytest.raises(UserError, match=message):
        load_task("ifeval", data)


@pytest.mark.parametrize(
    ("name", "package", "given"),
    [
        ("language:response_language", "langdetect", {"language": "de"}),
        ("change_case:english_capital", "langdetect", {}),
        ("length_constraints:number_sentences", "nltk", {"num_sentences": 3, "relation": "at least"}),
    ],
)  # fmt: skip
def test_instruction_without_its_package_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, given: dict[str, Any]
) -> None:
    data = write(
        tmp_path / "f.jsonl", [ROWS[1] | {"instruction_id_list": [name], "kwargs": [given]}]
    )
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MachineError, match=rf"{name} needs the package {package}.*bass-cli\[ifeval\]"
    ):
        load_task("ifeval", data)


def test_sentences_without_punkts_data_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    punkt = pytest.importorskip("nltk.tokenize.punkt")

    def missing(language: str) -> Any:
        raise LookupError(language)

    monkeypatch.setattr(punkt, "PunktTokenizer", missing)
    ifeval._sentences.cache_clear()
    name, given = (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
    )
    data = write(
        tmp_path / "f.jsonl", [ROWS[1] | {"instruction_id_list": [name], "kwargs": [given]}]
    )
    with pytest.raises(MachineError, match=rf"{name} needs NLTK's data punkt_tab.*nltk.downloader"):
        load_task("ifeval", data)
