"""Small real jobs of bass for kills.py and power_cuts.py: tiny models, a process that has imported
everything and forks the command, and the comparison of a disturbed job's files with those of an
undisturbed run (lines lost, doubled, changed). Not a script.
"""

import argparse
import atexit
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

OUT, VERDICTS, SCORED = "o.jsonl", "o.jsonl.verdicts.jsonl", "scored.jsonl"
_CONTEXT = 200
_PROBLEMS = 2
_ALLOW = "--allow-code-execution --allow-weak-sandbox"  # the programs are harmless


# fields that depend on the run, not on the sample: times, other rows of the batch, rounding
_MEASURED = ("seconds", "rounds", "drafted", "accepted", "mean_logprob", "sum_logprob", "isolation")


class Job(NamedTuple):
    """A command of bass, its output files with lines, and their manifest."""

    command: str
    arguments: list[str]
    files: tuple[str, ...]
    manifest: str | None = f"{OUT}.manifest.json"


class Differences(NamedTuple):
    """How many lines a disturbed run lost, doubled and changed."""

    lost: int = 0
    doubled: int = 0
    changed: int = 0

    def __add__(self, other):
        return Differences(*map(sum, zip(self, other, strict=True)))


def write_model(folder, seed):
    """Write a random Llama model in the real format, and a tokenizer of single bytes."""
    import tokenizers
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    texts = ["<pad>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({text: number for number, text in enumerate(texts)}, [])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=len(texts),
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        intermediate_size=24,
        max_position_embeddings=_CONTEXT,
    )
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def write_inputs(folder):
    """Write two models of 0.1 MB, a pair of them, prompts (two of which cannot be run) and problems
    with their tests."""
    for seed, name in enumerate(("target", "draft")):
        write_model(folder / name, seed)
    (folder / "pair.yaml").write_text("target: target\ndraft: draft\nspeculation: {length: 3}\n")
    prompts = [
        {"id": f"p{number}", "prompt": f"line {number} says", "far": "é" * (number % 4) * 40}
        for number in range(16)
    ]
    prompts[7]["prompt"] = "x" * 2 * _CONTEXT
    prompts[12]["prompt"] = "half \ud800"
    (folder / "p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    problems = [
        {
            "task_id": f"Small/{number}",
            "prompt": f"def f{number}(x):\n",
            "entry_point": f"f{number}",
            "test": "def check(f):\n    assert f(1) is None\n",
        }
        for number in range(_PROBLEMS)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    bodies = ("    pass\n", "    return 1\n", "    return f\n", "    raise ValueError\n")
    samples = [
        {"task_id": f"Small/{number}", "completion": body + f"# {number}\n"}
        for number in range(_PROBLEMS)
        for body in bodies
    ]
    (folder / SCORED).write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def generation(chance):
    """Make a `bass generate` job with random draft, batch size and temperature; the seed fixes its
    samples."""
    draft = chance.choice(("--draft none --draft-length auto", "--draft lookup", ""))
    tokens, rows = chance.choice((5, 15)), chance.choice((3, 8))
    command = (
        f"generate p.jsonl --pair pair.yaml --device cpu --out {OUT} --token-ids --n 3 {draft} "
        f"--max-new-tokens {tokens} --batch-size {rows} --seed {chance.randrange(100)} "
        f"--temperature {chance.choice((0, 0.8, 1))}"
    )
    return Job("generate", command.split(), (OUT,))


def evaluation(chance):
    """Make a `bass eval` job, with its programs."""
    command = (
        f"eval humaneval --data tasks.jsonl --pair pair.yaml --device cpu --out {OUT} --n 2 "
        f"--max-new-tokens 9 --seed {chance.randrange(100)} --workers 2 {_ALLOW}"
    )
    return Job("eval", command.split(), (OUT, VERDICTS))


def scoring(chance):
    """Make a `bass score` job for a file of another tool."""
    command = (
        f"score {SCORED} --data tasks.jsonl --task humaneval --workers 2 --report report.json "
        f"{_ALLOW}"
    )
    return Job("score", command.split(), (f"{SCORED}.verdicts.jsonl",), manifest=None)


def import_everything(folder):
    """Import everything that the commands import, with one thread: every job is a fork of this
    process."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    import transformers  # noqa: F401

    from bass_cli.formats.tokenizer import Tokenizer

    write_inputs(folder)
    Tokenizer.load(folder / "target")


def inputs_for(folder, source):
    """Make a folder for a job, with links to its inputs."""
    folder.mkdir()
    for name in ("target", "draft", "pair.yaml", "p.jsonl", "tasks.jsonl", SCORED):
        (folder / name).symlink_to(source / name)
    return folder


def start(job, folder, log, before=lambda: None):
    """Fork the command; return its process id. Its output goes to `log`; `before` is called there
    first."""
    if child := os.fork():
        return child
    code = 70
    atexit._clear()  # runs the command's exit handlers, but not those of the script
    try:
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number in (1, 2):
            os.dup2(output, number)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before()
        from bass_cli.__main__ import main

        sys.argv = ["bass", *job.arguments]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(child):
    """Return the exit code of a started process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish_within(child, seconds):
    """Return the exit code, or None if the process is still running."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def disturb_many(disturb, text, *, unit, count, others):
    """Run a script: call `disturb(job, place, counts, most, chance)` for one job after the other,
    until `counts[unit]` reaches `count` or something is wrong. Then print the figures; exit code
    1 for errors. Every `others`th job is an evaluation or a scoring."""
    parser = argparse.ArgumentParser(description=text.split("\n\n")[0])
    parser.add_argument(f"--{unit}", dest="most", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    chance, began = random.Random(args.seed), time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    differences, faults = Differences(), list[str]()
    with tempfile.TemporaryDirectory(prefix=f"bass-{unit}-") as folder:
        place = Path(folder)
        import_everything(place)
        while counts[unit] < args.most and not faults:
            counts["jobs"] += 1
            other = chance.choice((evaluation, scoring)) if counts["jobs"] % others == 0 else None
            job = (other or generation)(chance)
            found, wrong = disturb(job, place, counts, args.most, chance)
            differences += found
            faults = [f"{' '.join(job.arguments)}: {one}" for one in wrong]
    figures = dict[str, object](counts) | differences._asdict()
    figures |= {"faults": faults, "seconds": round(time.monotonic() - began)}
    print(
        json.dumps(figures)
        if args.json
        else "\n".join(f"{key:29} {value}" for key, value in figures.items())
    )
    sys.exit(bool(faults))


def rows_of(content):
    """Yield every line with its JSON object, or None if it is broken."""
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        yield line, row if isinstance(row, dict) else None


def whole_lines(content):
    """Return the lines that count, {key: [bytes, ...]}: verdicts, and samples that did not fail."""
    found: dict[tuple, list[bytes]] = {}
    for line, row in rows_of(content):
        if row is not None and row.get("finish_reason") != "error":
            found.setdefault((row.get("id", row.get("task_id")), row.get("sample")), []).append(
                line
            )
    return found


def read(path):
    return path.read_bytes() if path.exists() else b""


def compare(job, folder, undisturbed, kept):
    """Compare the lines of a finished job with those of an undisturbed one, and with those that had
    to survive: `kept`, {file: {key: [bytes]}}. Failed prompts have one line too. Any other
    difference (a broken line, an unfinished manifest, a superfluous file) counts as changed."""
    total = Differences()
    for name in job.files:
        there, expected = (whole_lines(read(place / name)) for place in (folder, undisturbed))
        held = kept.get(name, {})
        total += Differences(
            lost=len(expected.keys() - there.keys())
            + sum(there.get(key, [])[:1] != lines[:1] for key, lines in held.items())
        )
        total += Differences(
            doubled=sum(len(lines) - 1 for lines in there.values()),
            changed=sum(
                key not in expected or _settled(lines[0]) != _settled(expected[key][0])
                for key, lines in there.items()
            ),
        )
        total += Differences(changed=_others(folder / name) != _others(undisturbed / name))
    if job.manifest is not None:
        ours, theirs = (
            json.loads(read(place / job.manifest) or b"{}") for place in (folder, undisturbed)
        )
        total += Differences(
            changed=any(ours.get(key) != theirs.get(key) for key in ("finished", "results"))
            or ours["totals"]["finish_reasons"] != theirs["totals"]["finish_reasons"]
        )
    names = [{path.name for path in place.iterdir()} for place in (folder, undisturbed)]
    return total + Differences(changed=names[0] != names[1])


def _settled(line):
    return {key: value for key, value in json.loads(line).items() if key not in _MEASURED}


def _others(path):
    """Return the lines of failed prompts, and broken ones."""
    return sorted(
        str(line if row is None else (row["id"], row["error"]))
        for line, row in rows_of(read(path))
        if row is None or row.get("finish_reason") == "error"
    )
