"""`bass filter`: which lines are kept, in all formats and layouts, with counts and a manifest."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, rows_in

from bass_cli.io.linefile import write_lines
from bass_cli.io.resume import check_manifest

ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "sample": 0,
        "text": '{"x": 1}',
        "finish_reason": "eos",
        "tokens": 4,
        "mean_logprob": -0.1,
    },
    {
        "id": "a",
        "sample": 1,
        "text": '{"x": 1}',
        "finish_reason": "eos",
        "tokens": 4,
        "mean_logprob": -0.1,
    },
    {
        "id": "b",
        "sample": 0,
        "text": '{"x": 1}',
        "finish_reason": "length",
        "tokens": 9,
        "mean_logprob": -0.9,
    },
    {
        "id": "b",
        "sample": 1,
        "text": '{"x": "é"}',
        "finish_reason": "eos",
        "tokens": 6,
        "mean_logprob": -0.4,
    },
    {
        "id": "c",
        "sample": 0,
        "text": "",
        "finish_reason": "error",
        "tokens": 0,
        "mean_logprob": None,
    },
]
MANIFEST = {
    "results": {"target": "t", "n": 2, "seed": 0},
    "job": {"n": 2},
    "versions": {"bass": "0"},
    "finished": True,
}


@pytest.fixture(autouse=True)
def place(here: Path) -> Path:
    write("s.jsonl", ROWS)
    Path("s.jsonl.manifest.json").write_text(json.dumps(MANIFEST))
    return here


def line(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def write(path: str, rows: list[Any]) -> None:
    write_lines(path, map(line, rows))


def bass(*words: str, code: int = 0, stdin: bytes | None = None) -> Any:
    return cli("filter", *words, code=code, input=stdin)


def kept(*words: str, file: str = "s.jsonl") -> list[str]:
    """Return the kept samples of a run, as "id sample"."""
    bass(file, *words, "--out", "o.jsonl", "--overwrite")
    return [f"{row['id']}{row['sample']}" for row in rows_in("o.jsonl")]


def test_each_criterion_keeps_what_it_says() -> None:
    Path("x.json").write_text('{"type": "object", "properties": {"x": {"type": "integer"}}}')
    assert kept("--where", 'finish_reason == "eos" and mean_logprob > -0.4') == ["a0", "a1"]
    assert kept("--min-tokens", "5") == ["b0", "b1"]
    assert kept("--max-tokens", "5") == ["a0", "a1", "c0"]
    assert kept("--min-chars", "9") == ["b1"]
    assert kept("--max-chars", "8") == ["a0", "a1", "b0", "c0"]
    assert kept("--valid-json") == ["a0", "a1", "b0", "b1"]
    assert kept("--schema", "x.json") == ["a0", "a1", "b0"]
    assert kept("--unique", "exact") == ["a0", "b0", "b1", "c0"]
    assert kept("--unique", "exact", "--within", "file") == ["a0", "b1", "c0"]
    assert kept("--unique", "exact", "--within", "file", "--key", "finish_reason") == [
        "a0",
        "b0",
        "c0",
    ]
    # a dropped sample is not compared with later ones
    assert kept("--unique", "exact", "--within", "file", "--where", "tokens > 4") == ["b0", "b1"]


def test_near_duplicates_are_dropped_by_threshold() -> None:
    text = "the quick brown fox jumps over the lazy dog and runs away from the old barn at night"
    texts = [text, text.replace("quick", "slow"), text.upper(), text + "."]
    write("n.jsonl", [{"id": "a", "sample": at, "text": one} for at, one in enumerate(texts)])
    assert kept("--unique", "near:0.95", file="n.jsonl") == ["a0", "a1", "a2"]
    assert kept("--unique", "near:0.5", file="n.jsonl") == ["a0", "a2"]
    assert kept("--unique", "near", "--where", "sample != 1", file="n.jsonl") == ["a0", "a2"]
    assert kept("--unique", "near:1", file="n.jsonl") == ["a0", "a1", "a2", "a3"]


def test_counts_name_the_first_reason() -> None:
    words = (
        "s.jsonl",
        "--where",
        "tokens > 0",
        *shlex.split("--max-tokens 8 --unique exact --out o.jsonl"),
    )
    found = bass(*words, "--json")
    assert json.loads(found.stdout) == {
        "samples": 5,
        "kept": 2,
        "dropped": {"the expression is false": 1, "more than 8 tokens": 1, "a duplicate": 1},
    }
    assert found.stderr.splitlines()[-4:] == [
        "5 samples: 2 kept in o.jsonl, 3 dropped",
        "  1  the expression is false",
        "  1  more than 8 tokens",
        "  1  a duplicate",
    ]
    assert bass(*words, "--overwrite", "--quiet").output == ""


def test_kept_lines_are_copied_byte_by_byte_and_in_order() -> None:
    odd = [
        b'{"b":1,  "a":"\\u00e9"}\n',
        b"\n",
        b'{"b": 2}\n',
        b'\xef\xbb\xbf{"b": 3.0}\r\n',
        b'{"b": 4}',
    ]
    Path("odd.jsonl").write_bytes(b"".join(odd))
    found = bass("odd.jsonl", "--where", "b != 2")
    assert found.stdout_bytes == odd[0] + odd[3] + odd[4] + b"\n"
    assert bass("-", "--where", "b != 2", stdin=b"".join(odd)).stdout_bytes == found.stdout_bytes


@pytest.mark.parametrize("source", ["i.jsonl", "i.jsonl.gz", "i.jsonl.zst", "i.parquet"])
@pytest.mark.parametrize("target", ["o.jsonl", "o.jsonl.gz", "o.jsonl.zst", "o.parquet"])
def test_all_formats_are_read_and_written(source: str, target: str) -> None:
    rows = [row | {"meta": {"level": row["tokens"]}} for row in ROWS]
    write(source, rows)
    bass(source, "--where", "meta.level != 4", "--out", target)
    assert [row | {"error": None} for row in rows_in(target)] == [
        row | {"error": None} for row in rows[2:]
    ]
    assert not list(Path().glob(".*.new"))


def test_compressed_standard_input_is_read() -> None:
    write("i.jsonl.zst", ROWS)
    found = bass("-", "--where", "tokens > 8", stdin=Path("i.jsonl.zst").read_bytes())
    assert found.stdout_bytes == line(ROWS[2])
    write("i.parquet", ROWS)
    found = bass("-", "--where", "tokens > 8", stdin=Path("i.parquet").read_bytes(), code=2)
    assert "stdin: this is a parquet file" in found.stderr


def grouped(*, numbers: bool = True) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in ROWS[:4]:
        shared = found.setdefault(row["id"], {"id": row["id"], "seed": 0, "samples": []})
        shared["samples"].append(
            {k: v for k, v in row.items() if k != "id" and (numbers or k != "sample")}
        )
    return [*found.values(), {"id": "c", "seed": 0, "samples": [], "error": "too long"}]


@pytest.mark.parametrize("numbers", [True, False])
def test_a_line_of_a_prompt_keeps_some_of_its_samples(numbers: bool) -> None:
    """They keep their numbers, which place them among the prompt's samples."""
    write("g.jsonl", grouped(numbers=numbers))
    bass("g.jsonl", "--where", 'finish_reason == "eos" and seed == 0', "--out", "o.jsonl")
    first, second = rows_in("o.jsonl")
    assert first == grouped(numbers=numbers)[0]  # unchanged
    assert second == {
        "id": "b",
        "seed": 0,
        "samples": [{k: v for k, v in ROWS[3].items() if k != "id"}],
    }
    bass("g.jsonl", "--where", 'finish_reason == "error"', "--out", "e.jsonl")
    assert rows_in("e.jsonl") == [grouped()[2]]
    manifest = json.loads(Path("o.jsonl.manifest.json").read_text())
    assert manifest["totals"]["finish_reasons"] == {"eos": 3}
    assert manifest["filtered"]["samples"] == 5


def test_the_manifest_keeps_the_settings_and_refuses_to_be_continued() -> None:
    bass("s.jsonl", "--where", "tokens > 4", "--out", "o.jsonl")
    manifest = json.loads(Path("o.jsonl.manifest.json").read_text())
    assert manifest["results"] == MANIFEST["results"] | {"filter": [{"where": "tokens > 4"}]}
    assert (manifest["finished"], manifest["job"]) == (True, {"n": 2})
    assert manifest["totals"]["samples"] == 2
    assert manifest["totals"]["tokens"] == 15
    bass("o.jsonl", "--max-tokens", "8", "--out", "p.jsonl")
    again = json.loads(Path("p.jsonl.manifest.json").read_text())
    assert again["results"]["filter"] == [{"where": "tokens > 4"}, {"max_tokens": 8}]
    with pytest.raises(Exception, match=r"filter: .* before, not given now"):
        check_manifest("o.jsonl", MANIFEST["results"])


def test_a_missing_key_is_an_error_or_drops_the_sample() -> None:
    found = bass("s.jsonl", "--where", "mean_logprb > -1", "--out", "o.jsonl", code=2)
    assert (
        's.jsonl:1: --where column 1: the line has no key "mean_logprb"; did you mean "mean_logprob"?'
        in found.stderr
    )
    assert "--missing drop leaves out such samples; has(KEY) in --where" in found.stderr
    assert not Path("o.jsonl").exists()
    found = bass("s.jsonl", "--where", "mean_logprob > -1", code=2)
    assert "s.jsonl:5: --where column 1: the value is null" in found.stderr
    bass("s.jsonl", "--where", "mean_logprob > -1", "--missing", "drop", "--out", "o.jsonl")
    assert len(rows_in("o.jsonl")) == 4
    assert json.loads(Path("o.jsonl.manifest.json").read_text())["filtered"]["dropped"] == {
        "a key is missing": 1
    }
    found = bass("s.jsonl", "--min-chars", "1", "--key", "meta.answer", code=2)
    assert 's.jsonl:1: the line has no key "meta"' in found.stderr
    found = bass(
        "s.jsonl", "--where", "text > 1", "--missing", "drop", code=2
    )  # a type is no missing key
    assert "> compares two numbers or two texts" in found.stderr
    write("f.jsonl", [{"text": "a"}])
    assert (
        "with --within file all lines are compared"
        in bass("f.jsonl", "--unique", "exact", code=2).stderr
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no criterion; add --where, --unique"),
        (("--where", "tokens = 3"), "--where column"),
        (("--unique", "nearly"), '--unique "nearly": write exact, near or near:THRESHOLD'),
        (("--unique", "near:2"), "--unique near:2: a number above 0 and up to 1"),
        (("--unique", "near:nan"), "a number above 0"),
        (("--within", "file"), "--within needs --unique"),
        (("--unique", "exact", "--within", "line"), "write prompt or file"),
        (("--min-tokens", "3", "--max-tokens", "2"), "--min-tokens 3 is more than --max-tokens 2"),
        (("--schema", "none.json"), "--schema none.json: cannot read the schema: No such file"),
        (("--schema", "bad.json"), "bad.json: it is no valid schema: 'objekt' is not valid"),
        (("--schema", "list.json"), "a schema is an object"),
        (
            ("--schema", "remote.json"),
            "refers to http://localhost:1/none.json, which is not in the file",
        ),
        (("--valid-json", "--schema", "x.json"), "give one of them"),
        (("--valid-json", "--key", "text +"), "write a key, like text"),
        (("--valid-json", "--missing", "skip"), '--missing "skip": write error or drop'),
        (("--valid-json", "--json"), "--json needs --out FILE"),
        (("--valid-json", "--out", "s.jsonl"), "this is FILE, which would be lost"),
        (("--valid-json", "--out", "there.jsonl"), "it exists; use --overwrite"),
        (("--valid-json", "--out", "o.csv"), "nothing is written as .csv"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(words: tuple[str, ...], message: str) -> None:
    Path("bad.json").write_text('{"type": "objekt"}')
    Path("list.json").write_text("[]")
    Path("remote.json").write_text('{"$ref": "http://localhost:1/none.json"}')
    Path("there.jsonl").write_text("{}\n")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    assert message in " ".join(bass("s.jsonl", *words, code=2).stderr.split())
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_an_output_that_is_not_replaced_keeps_its_manifest() -> None:
    bass("s.jsonl", "--where", "tokens > 4", "--out", "o.jsonl")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    bass(
        "s.jsonl", "--where", "mean_logprob < 0", "--out", "o.jsonl", "--overwrite", code=2
    )  # fails in line 5
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
    bass("s.jsonl", "--where", "tokens > 8", "--out", "o.jsonl", "--overwrite")
    assert json.loads(Path("o.jsonl.manifest.json").read_text())["totals"]["samples"] == 1


def test_broken_lines_are_errors_except_for_a_torn_last_one() -> None:
    good = b"".join(map(line, ROWS))
    Path("torn.jsonl").write_bytes(good + b'{"id": "d", "sam')
    found = bass("torn.jsonl", "--where", "tokens >= 0")
    assert found.stdout_bytes == good
    assert "torn.jsonl: line 6, the last one, is incomplete and was left out" in found.stderr
    Path("torn.jsonl").write_bytes(b"{]\n" + good)
    assert (
        "torn.jsonl:1: broken JSON" in bass("torn.jsonl", "--where", "tokens >= 0", code=2).stderr
    )
    assert (
        "none.jsonl: cannot read the file: No such file"
        in bass("none.jsonl", "--valid-json", code=2).stderr
    )


def test_patterns_of_a_schema_match_as_jsonschema_does_and_have_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jsonschema

    pattern = {"type": "string", "pattern": r"^\d+(px|em)$|^auto"}
    Path("p.json").write_text(json.dumps(pattern))
    values = ["12px", "px", "12pxx", "automatic", "x auto", "", "٣px", 5]
    write(
        "v.jsonl",
        [{"id": "a", "sample": at, "text": json.dumps(one)} for at, one in enumerate(values)],
    )
    due = [
        f"a{at}"
        for at, one in enumerate(values)
        if jsonschema.Draft202012Validator(pattern).is_valid(one)
    ]
    assert kept("--schema", "p.json", file="v.jsonl") == due != []
    monkeypatch.setattr("bass_cli.data.filtering.PATIENCE", 0.1)
    Path("p.json").write_text('{"pattern": "(a|aa)+$"}')
    write("v.jsonl", [{"text": json.dumps("a" * 80 + "b")}])
    found = bass("v.jsonl", "--schema", "p.json", code=2).stderr
    assert "v.jsonl:1: --schema p.json: a pattern takes more than 0.1 s on this text" in found


def test_keys_of_a_schema_match_as_jsonschema_does_and_have_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jsonschema

    schema = {
        "properties": {"n": True},
        "patternProperties": {"^x": {"type": "integer"}, "y$": {"minimum": 3}},
        "additionalProperties": {"type": "string"},
    }
    values: list[Any] = [{}, {"n": 1.5}, {"x": 1}, {"x": "a"}, {"y": 2}, {"y": "a"}, {"xy": 2}]
    values += [{"xy": 4}, {"other": 1}, {"other": "a"}, 5]
    write("v.jsonl", [{"text": json.dumps(one), "value": at} for at, one in enumerate(values)])
    for extra in (schema["additionalProperties"], False):
        found = schema | {"additionalProperties": extra}
        Path("p.json").write_text(json.dumps(found))
        validator = jsonschema.Draft202012Validator(found)
        due = [at for at, one in enumerate(values) if validator.is_valid(one)]
        lines = bass("v.jsonl", "--schema", "p.json").stdout.splitlines()
        assert [json.loads(line)["value"] for line in lines] == due != []
    monkeypatch.setattr("bass_cli.data.filtering.PATIENCE", 0.1)
    write("v.jsonl", [{"text": json.dumps({"a" * 80 + "b": 1})}])
    for keyword in ("true", "false"):
        content = (
            f'{{"additionalProperties": {keyword}, "patternProperties": {{"(a|aa)+$": true}}}}'
        )
        Path("p.json").write_text(content)
        assert "takes more than 0.1 s" in bass("v.jsonl", "--schema", "p.json", code=2).stderr
    Path("p.json").write_text('{"pattern": "(?:a{999}){999}"}')
    write("v.jsonl", [{"text": '"a"'}])
    assert "a pattern is not valid" in bass("v.jsonl", "--schema", "p.json", code=2).stderr


def test_numbers_that_json_lacks_are_no_valid_json() -> None:
    texts = [
        "1",
        " [1] ",
        "NaN",
        "[Infinity]",
        "{'a': 1}",
        "",
        '{"a": 1} x',
        "[" * 100_000,
        '"\ud800"',
    ]
    write("j.jsonl", [{"id": "a", "sample": at, "text": one} for at, one in enumerate(texts[:-1])])
    assert kept("--valid-json", file="j.jsonl") == ["a0", "a1"]


def test_a_file_larger_than_the_limit_of_memory_is_filtered(place: Path) -> None:
    """200 MB of lines through a process that may take 120 MB more than it has at its start."""
    row = line({"id": "a", "sample": 0, "text": "x" * 1_000_000, "tokens": 1})
    code = (
        "import resource, sys; import bass_cli.data.filtering, numpy, pyarrow, regex\n"
        "from bass_cli.cli.commands import main\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 120 * 2**20,) * 2)\n"
        "sys.argv = ['bass', 'filter', '-', '--unique', 'exact', '--within', 'file', '--out', 'o.jsonl']; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=place)
    assert process.stdin is not None
    for _ in range(200):
        process.stdin.write(row)
    process.stdin.close()
    assert process.wait(120) == 0
    assert (place / "o.jsonl").read_bytes() == row
