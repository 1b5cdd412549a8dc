"""Tasks of YAML files: prompts, examples, rules that find answers, checks, and faults of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bass_cli.errors import UserError
from bass_cli.eval.tasks import answers, load_task, own, task_file
from bass_cli.eval.tasks.own import OwnTask

ROOT = Path(__file__).parent.parent.parent
BASE: dict[str, Any] = {
    "data": "d.jsonl",
    "prompt": "Q: {{ q }}\nA:",
    "answer": "{{ a }}",
    "check": "exact",
}
RECORDS = [{"q": f"question {i}", "a": f"answer {i}"} for i in range(6)]


@pytest.fixture(scope="module")
def finder() -> answers.Finder:
    return answers.Finder()


@pytest.fixture(autouse=True)
def place(finder: answers.Finder, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder. All tasks share a finder, because each has a child process."""
    monkeypatch.setattr(own, "Finder", lambda: finder)
    return here


def task(records: list[dict[str, Any]] | None = None, **keys: Any) -> OwnTask:
    """Write a task file and its data, and load them. A key that is None is left out."""
    found = {key: value for key, value in {**BASE, **keys}.items() if value is not None}
    text = ""
    for key, value in found.items():  # JSON is YAML; each key and each item has a line of its own
        items = "".join(f"\n- {json.dumps(one)}" for one in value) if type(value) is list else ""
        text += f"{key}: {items or json.dumps(value)}\n"
    Path("t.yaml").write_text(text)
    lines = RECORDS if records is None else records
    Path("d.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    loaded = load_task("t.yaml")
    assert isinstance(loaded, OwnTask)
    return loaded


def status(one: OwnTask, text: str, number: int = 1) -> str:
    return one.check(one.problems[f"t/{number}"], text).status


def test_prompt_question_and_system_are_rendered_from_the_fields() -> None:
    one = task(
        fields={"loud": "{{ q | upper }}", "louder": "{{ loud }}!"},
        question="{{ louder }}",
        system="Be brief.",
        stop="\nQ:",
        sampling={"temperature": 0, "max_new_tokens": 7},
    )
    problem = one.problems["t/2"]
    assert problem.prompt == "Q: question 1\nA:"
    assert one.messages(problem) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "QUESTION 1!"},
    ]
    assert (one.stops, one.executes, one.rates) == (("\nQ:",), False, False)
    assert one.defaults._asdict() == {"temperature": 0, "top_p": 0.95, "max_new_tokens": 7}


def test_problems_are_named_by_a_field_or_by_number() -> None:
    assert list(task().problems) == [f"t/{i}" for i in range(1, 7)]
    assert list(task(id="q", name="other").problems) == [f"question {i}" for i in range(6)]
    with pytest.raises(UserError, match=r'd\.jsonl:2: problem "x" occurs twice in the data'):
        task([{"q": "x", "a": "1"}, {"q": "x", "a": "2"}], id="q")


def test_data_is_beside_the_file_and_can_be_replaced(place: Path) -> None:
    task()
    (place / "inner").mkdir()
    (place / "t.yaml").rename(place / "inner" / "t.yaml")
    with pytest.raises(
        UserError, match=r'inner/t\.yaml:1: key "data": .*/inner/d\.jsonl: there is no such'
    ):
        load_task("inner/t.yaml")
    assert len(load_task("inner/t.yaml", "d.jsonl").problems) == 6


def test_examples_are_chosen_by_the_seed_and_never_the_asked_problem() -> None:
    def shown(seed: int) -> list[list[str]]:
        examples = {"target": " {{ a }}", "number": 3, "seed": seed}
        one = task(examples=examples)
        parts = [problem.prompt.split("\n\n") for problem in one.problems.values()]
        for number, (*before, asked) in enumerate(parts):
            assert asked == f"Q: question {number}\nA:"
            assert len(set(before)) == 3
            assert not any(f"question {number}\n" in example for example in before)
            assert set(before) < {f"Q: question {i}\nA: answer {i}" for i in range(6)}
        return [part[:-1] for part in parts]

    first = shown(0)
    assert shown(0) == first
    assert shown(1) != first
    # Problems that are not among the first three examples have the same ones.
    assert len({tuple(examples) for examples in first}) == 4


def test_examples_of_a_file_or_inline_become_turns_of_a_chat() -> None:
    inline = [{"q": "question 0", "a": "yes"}, {"q": "other", "a": "no"}]
    one = task(question="{{ q }}", examples={"target": " {{ a }}", "records": inline})
    assert one.problems["t/2"].prompt == (
        "Q: question 0\nA: yes\n\nQ: other\nA: no\n\nQ: question 1\nA:"
    )
    turns = [("user", "question 0"), ("assistant", "yes"), ("user", "other"), ("assistant", "no")]
    messages = one.messages(one.problems["t/2"])
    assert [(one["role"], one["content"]) for one in messages] == [*turns, ("user", "question 1")]
    assert [one["content"] for one in one.messages(one.problems["t/1"])] == [
        "other",
        "no",
        "question 0",
    ]
    Path("e.jsonl").write_text("".join(json.dumps(one) + "\n" for one in inline))
    examples = {"target": " {{ a }}", "data": "e.jsonl", "number": 2, "chat": False}
    other = task(RECORDS[1:], question="{{ q }}", examples=examples)
    assert set(other.problems["t/1"].prompt.split("\n\n")) == {
        "Q: question 0\nA: yes",
        "Q: other\nA: no",
        "Q: question 1\nA:",
    }
    assert len(other.messages(other.problems["t/1"])) == 1
    with pytest.raises(UserError, match=r"d\.jsonl:1: t\.yaml:\d+: key \"examples.number\": 2 exa"):
        task(examples=examples, question="{{ q }}")  # the only other one is not enough for t/1


TEXT = 'First {"a": {"b": 1}}.\nAnswer: no\n<b>x1</b> <b>x2</b>\nAnswer: yes, it is\n{"a": {"b": "two"}} end'


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"regex": "<b>(.*?)</b>"}, "x2"),
        ({"regex": "<b>(.*?)</b>", "match": "first"}, "x1"),
        ({"regex": "<b>(.*?)</b>", "group": 0, "match": "first"}, "<b>x1</b>"),
        ({"regex": "<b>(?P<letter>.)(?P<number>.)</b>", "group": "number"}, "2"),
        ({"regex": "x[0-9]"}, "x2"),
        ({"after": "Answer:"}, "yes, it is"),
        ({"after": "Answer:", "match": "first"}, "no"),
        ({"after": "Answer:", "until": ","}, "yes"),
        ({"after": "</b>\n", "until": ""}, 'Answer: yes, it is {"a": {"b": "two"}} end'),
        ({"json_key": "a.b"}, "two"),
        ({"json_key": "a.b", "match": "first"}, "1"),
        ({"json_key": "a"}, '{"b": "two"}'),
        ({"json_key": "b"}, None),
        ([{"regex": "z"}, {"after": "First", "until": "."}], '{"a": {"b": 1}}'),
        ([{"regex": "z"}, {"after": "Z"}], None),
    ],
)
def test_rules_find_the_answer(rule: Any, expected: str | None) -> None:
    one = task(extract=rule)
    assert one.answer(one.problems["t/1"], TEXT) == expected
    assert one.completion(one.problems["t/1"], TEXT, chat=True) == TEXT


def test_code_is_found_by_language_and_place() -> None:
    text = "```json\n[1]\n```\n```python\nx = 1\n```\n```json\n[2]\n```\n"
    finder = answers.Finder()
    for keys, expected in [
        ({"code": "json"}, "[1]\n"),
        ({"code": "json", "match": "last"}, "[2]\n"),
        ({"code": "any"}, "[1]\n"),
        ({"code": "python"}, "x = 1"),
        ({"code": "rust"}, None),
    ]:
        assert finder.find([answers.Extract(**keys)], text) == expected


def test_thoughts_are_left_out() -> None:
    one = task(check="numeric", answer="{{ 7 }}")
    assert status(one, "<think>It is 7.</think>\n8") == "failed"
    assert status(one, "<think>8?</think>\n7") == "passed"


@pytest.mark.parametrize(
    ("text", "right", "options", "expected"),
    [
        ("The result is 1,234.50 dollars.", "1234.5", {}, "passed"),
        ("$1,234,567", "1234567", {}, "passed"),
        ("-$5", "-5", {}, "passed"),
        ("\u22125", "-5", {}, "passed"),
        ("10-3 = 7", "7", {}, "passed"),
        ("10-3", "-3", {}, "failed"),
        ("10-3", "3", {}, "passed"),
        ("about 18.", "18", {}, "passed"),
        ("18 or 19", "18", {}, "failed"),
        ("18 or 19", "18", {"match": "first"}, "passed"),
        ("50%", "50", {}, "passed"),
        ("50 %", "0.5", {"percent": "fraction"}, "passed"),
        ("50%", "0.5", {}, "failed"),
        ("2.5e3", "2500", {}, "passed"),
        (".5", "0.5", {}, "passed"),
        ("0.1", "0.1000000000000000055511151231257827", {}, "failed"),
        ("3.1416", "3.14159", {"tolerance": 1e-4}, "passed"),
        ("3.15", "3.14159", {"tolerance": 1e-4}, "failed"),
        ("101", "100", {"relative_tolerance": 0.01}, "passed"),
        ("101.1", "100", {"relative_tolerance": 0.01}, "failed"),
        ("1,2,3", "3", {}, "passed"),
        ("-1,2,3", "-1", {"match": "first"}, "passed"),
        ("12,34", "34", {}, "passed"),
        ("1,2345", "2345", {}, "passed"),
        ("18, or 19,", "19", {}, "passed"),
        ("1,234.", "1234", {}, "passed"),
        ("\\$1,234.5\\%", "1234.5", {}, "passed"),
        ("x2 y", "2", {}, "passed"),
        ("9" * 5000, "9", {}, "no answer"),
        ("1" + ",111" * 300000 + "1", "1", {}, "failed"),  # in linear time
        ("none", "1", {}, "no answer"),
    ],
)
def test_numbers_are_compared_by_value(
    text: str, right: str, options: dict[str, Any], expected: str
) -> None:
    one = task([{"q": "x", "a": right}], check={"numeric": options})
    assert status(one, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1,200.50", "1200.5"), ("-.25", "-0.25"), ("12e-4", "0.0012"), ("3e2", "300"), ("-0", "0")],
)
def test_equal_numbers_are_equal_answers(text: str, expected: str) -> None:
    one = task([{"q": "x", "a": "1"}], check="numeric")
    assert one.answer(one.problems["t/1"], text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" B", "B"),
        ("(B) because A is wrong", "B"),
        ("B. Berlin", "B"),
        ("b", "B"),
        ("The answer is (B).", "B"),
        ("Answer: **B**\n", "B"),
        ("I first thought of A. The correct answer is B", "B"),
        ("A dog is no cat, so the choice is C.", "C"),
        ("A and B are wrong, D.", "D"),
        ("It is option D) by far", "D"),
        ("Because E", None),
        ("A dog", None),
        ("", None),
    ],
)
def test_letter_of_a_choice_is_found(text: str, expected: str | None) -> None:
    one = task([{"q": "x", "a": 1}], answer="{{ 'ABCD'[a] }}", check="choice")
    assert one.answer(one.problems["t/1"], text) == expected
    assert (status(one, text) == "passed") is (expected == "B")


def test_texts_are_normalised_as_asked_and_any_of_several_answers_is_right() -> None:
    records = [{"q": "x", "a": ["The Nile", "nile river"]}]
    plain = task(records, answer=None, answers="a")
    everything = task(
        records,
        answer=None,
        answers="a",
        check={"exact": {"ignore_case": True, "ignore_punctuation": True, "ignore_articles": True}},
    )
    for text, plainly, normalised in [
        ("  The   Nile\n", "passed", "passed"),
        ("nile", "failed", "passed"),
        ("Nile River!", "failed", "passed"),
        ("the Congo", "failed", "failed"),
        ("", "no answer", "no answer"),
    ]:
        assert (status(plain, text), status(everything, text)) == (plainly, normalised)


def test_pattern_is_made_of_the_record() -> None:
    records = [{"q": "x", "a": "b+"}]
    pattern = "a{1,2}{{ a }}c"
    one = task(records, answer=None, check={"regex": {"pattern": pattern}})
    assert [status(one, text) for text in ("abbc", "aabc", "xabc", "aaabc")] == [
        "passed",
        "passed",
        "failed",
        "failed",
    ]
    part = task(records, answer=None, check={"regex": {"pattern": pattern, "whole": False}})
    assert status(part, "xabcx") == "passed"
    with pytest.raises(
        UserError, match=r'd\.jsonl:1: t\.yaml:\d+: key "check.regex.pattern": .*b\('
    ):
        task([{"q": "x", "a": "b("}], answer=None, check={"regex": {"pattern": pattern}})


def test_changed_rules_and_answers_change_the_key_of_a_check() -> None:
    def key(**keys: Any) -> str:
        one = task(**keys)
        return one.check_key(one.problems["t/1"])

    keys = [
        key(),
        key(extract={"after": "A"}),
        key(check={"exact": {"ignore_case": True}}),
        key(answer="{{ a }}."),
    ]
    assert len(set(keys)) == 4
    assert key(prompt="{{ q }}", stop="x", sampling={"temperature": 1}) == keys[0]


@pytest.mark.usefixtures("children")
def test_slow_expression_is_an_error_that_names_key_and_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "_SECONDS", 0.2)
    monkeypatch.setattr(own, "Finder", answers.Finder)  # with this limit
    one = task(extract={"regex": "(x+x+)+y"})
    with pytest.raises(UserError, match=r'key "extract": on a sample of t/1: it takes more than'):
        status(one, "x" * 60)
    assert status(one, "xxy answer 0") == "failed"  # the child process was replaced


@pytest.mark.usefixtures("children")
def test_endless_template_is_an_error_that_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_file, "_SECONDS", 0.2)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r't\.yaml:2: key "prompt": it takes more than 0\.2 s'):
        task(prompt=endless, answer="x")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompts": "x"}, 't.yaml:5: unknown key "prompts"; did you mean "prompt"?'),
        ({"tests": "x"}, 't.yaml:5: unknown key "tests"; write it under "check.program"'),
        ({"check": None}, 't.yaml:1: key "check": it is missing'),
        ({"check": "exakt"}, "t.yaml:4: key \"check\": there is no check 'exakt'; did you mean "),
        ({"check": {"exact": {"ignore": True}}}, 'unknown key "check.exact.ignore"; '),
        ({"check": {"exact": {}, "regex": {"pattern": "x"}}}, 'key "check": one of exact, regex,'),
        ({"check": {"numeric": {"tolerance": -1}}}, 't.yaml:4: key "check.numeric.tolerance": it'),
        ({"check": {"choice": {"letters": "aa"}}}, 'key "check.choice.letters": 2 to 26 different'),
        ({"answer": None}, 't.yaml:1: it needs the key "answer", which the check compares with'),
        ({"answers": "a"}, '"answer" and "answers" exclude each other'),
        ({"check": {"regex": {"pattern": "x"}}}, '"answer" has no effect with this check'),
        ({"prompt": None}, 'it needs the key "prompt" (for raw text) or "question" (for chats)'),
        ({"system": "x"}, '"system" belongs to chats, which need the key "question"'),
        ({"prompt_format": "chat"}, '"prompt_format" chat needs the key "question"'),
        ({"extract": {"regex": "("}}, "t.yaml:5: key \"extract.regex\": '(' is no regular expres"),
        ({"extract": [{"after": "a"}, {"regex": "("}]}, 't.yaml:7: key "extract.1.regex": '),
        ({"extract": {"after": "a", "code": "c"}}, "after and code exclude each other; give one"),
        ({"extract": [{"match": "first"}]}, 't.yaml:6: key "extract.0": it has no rule; give one'),
        ({"extract": {"regex": "a", "group": 1}}, "the regex has no group 1; known: 0"),
        ({"extract": {"after": "a", "group": 1}}, '"group" belongs to "regex"'),
        ({"extract": {"regex": "a", "until": "b"}}, '"until" belongs to "after"'),
        ({"examples": {"number": 3}}, 't.yaml:5: key "examples.target": it is missing'),
        ({"examples": {"target": "x", "number": 0}}, 't.yaml:5: key "examples.number": it should'),
        (
            {"examples": {"target": "x", "records": [{"q": "y"}], "seed": 1}},
            't.yaml:5: key "examples": "seed" has no effect, because all "records" are used',
        ),
        (
            {"prompt": None, "question": "{{ q }}", "stop": "x"},
            '"stop" belongs to raw prompts, which need the key "prompt"',
        ),
        (
            {
                "prompt": None,
                "question": "{{ q }}",
                "examples": {"target": "x", "records": [{"q": "y"}], "chat": False},
            },
            '"examples" have no effect with "chat" false and no "prompt"',
        ),
        (
            {"examples": {"target": "{{ b }}", "records": [{"q": "y"}]}},
            'key "examples.records.0": t.yaml:5: key "examples.target": \'b\' is undefined',
        ),
        ({"name": "a/b"}, "t.yaml:5: key \"name\": 'a/b' is no name of a task"),
        ({"sampling": {"temperature": True}}, 'key "sampling.temperature": a number is needed, no'),
        ({"fields": {"a b": "x"}}, "key \"fields\": 'a b' is no name that a template can use"),
        (
            {"prompt": "{{ qq }}"},
            "d.jsonl:1: t.yaml:2: key \"prompt\": 'qq' is undefined; did you ",
        ),
        ({"prompt": "{{ q"}, 'd.jsonl:1: t.yaml:2: key "prompt": line 1: unexpected end of templ'),
        ({"prompt": "{{ q.__class__.__mro__ }}"}, 'key "prompt": '),
        ({"fields": {"x": "{{ y }}"}}, "key \"fields.x\": 'y' is undefined"),
        ({"answer": " "}, "key \"answer\": the right answer ' ' has no text"),
        ({"check": "numeric"}, "the right answer 'no number' has no number"),
        ({"answer": None, "answers": "q"}, 'key "answers": ValueError: a list of answers is neede'),
        ({"id": "name"}, "d.jsonl:1: t.yaml:5: key \"id\": there is no field 'name'"),
        (
            {"answer": None, "check": {"function": {"file": "no.py"}}},
            'key "check.function.file": /',
        ),
    ],
)
def test_faults_of_a_file_name_line_and_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        task([{"q": "x", "a": "no number"}], **keys)
    assert message in str(caught.value)
    assert "t.yaml:" in str(caught.value)


def test_file_of_a_check_function_must_define_it() -> None:
    for source, message in [
        ("def other(a, b):\n    return True\n", "there is no function check; it defines other"),
        ("x = 1\n", "there is no function check; it defines none"),
        ("def check(:\n", "c.py:1: not valid Python: invalid syntax"),
    ]:
        Path("c.py").write_text(source)
        with pytest.raises(UserError) as caught:
            task(answer=None, check={"function": {"file": "c.py"}})
        assert message in str(caught.value)


@pytest.mark.parametrize("key", ["name: gsm8k\n", ""], ids=["key", "file name"])
def test_name_of_a_task_of_bass_is_refused(key: str) -> None:
    """`bass score` finds the task by its name in the manifest."""
    Path("gsm8k.yaml").write_text(
        key + 'data: d.jsonl\nprompt: "{{ q }}"\nanswer: "1"\ncheck: exact\n'
    )
    with pytest.raises(
        UserError, match=r"gsm8k\.yaml.*: gsm8k is a task of bass.*such as my-gsm8k"
    ):
        load_task("gsm8k.yaml")


def test_unknown_task_and_missing_file_are_named() -> None:
    with pytest.raises(UserError, match='there is no task "gsm9k"; did you mean "gsm8k"'):
        load_task("gsm9k")
    with pytest.raises(UserError, match=r"no\.yaml: cannot read the task file: No such file"):
        load_task("no.yaml")
    Path("list.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match=r"list\.yaml:1: a task file is a mapping with at least"):
        load_task("list.yaml")


GSM8K = [
    {"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    {"question": "How many?", "answer": "Many.\n#### 1,450"},
]


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> OwnTask:
    path = tmp_path_factory.mktemp("gsm8k") / "g.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in GSM8K))
    loaded = load_task("gsm8k", str(path))
    assert isinstance(loaded, OwnTask)
    return loaded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000 + 450 = 1450\n#### 1450", "passed"),
        ("#### $1,450.00", "passed"),
        ("#### 1450 dollars in 3 weeks", "passed"),
        ("#### Step 1\n1000 + 450\n#### Step 2\nThat is 1,450 dollars.", "passed"),
        ("so \\(\\boxed{1450}\\) after 2 days", "passed"),
        ("The answer is 1450.", "passed"),
        ("#### 1450\nOr 3?", "passed"),
        ("1450\n#### 145", "failed"),
        ("#### -1450", "failed"),
        ("I do not know.", "no answer"),
        (100_000 * "#" + " 1450", "passed"),  # within the limit on time, which is an error
        ("\\boxed{" + 100_000 * "1", "no answer"),
    ],
    ids=lambda value: value[:40],
)
def test_gsm8k_takes_the_marked_number_else_the_last(
    gsm8k: OwnTask, text: str, expected: str
) -> None:
    problem = gsm8k.problems["gsm8k/2"]
    assert gsm8k.check(problem, text).status == expected
    assert gsm8k.check(problem, str(GSM8K[1]["answer"])).status == "passed"
    assert problem.prompt.count("Question:") == 5
    assert problem.prompt.endswith("Question: How many?\nAnswer:")
    assert len(gsm8k.messages(problem)) == 1


def test_multiple_choice_task_of_the_guide() -> None:
    guide = (ROOT / "docs" / "guide" / "tasks.md").read_text()
    text = guide.split("```yaml\n")[1].split("```")[0]
    assert text.count("hf:cais/mmlu:anatomy:") == 2
    for split in ("test", "dev"):
        text = text.replace(f"hf:cais/mmlu:anatomy:{split}", f"{split}.jsonl")
    Path("m.yaml").write_text(text)
    for name, numbers in (("test", range(2)), ("dev", range(2, 9))):
        records = [
            {"question": f"Question {i}?", "choices": ["w", "x", "y", "z"], "answer": i % 4}
            for i in numbers
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    one = load_task("m.yaml")
    problem = one.problems["m/2"]
    *examples, asked = problem.prompt.split("\n\n")
    assert asked == "Question 1?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    assert len(examples) == 5
    for example in examples:
        number = int(example.removeprefix("Question ")[0])
        assert example.endswith(f"D. z\nAnswer: {'ABCD'[number % 4]}")
    assert [one.check(problem, text).status for text in (" B", "A. w", "none")] == [
        "passed",
        "failed",
        "no answer",
    ]
    assert len(one.messages(problem)) == 11
