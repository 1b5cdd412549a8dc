"""`bass doctor` and `bass pairs` for pair files: memory, folders, sandbox, hub, and faults of a
pair."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from checkpoints import write_checkpoint, write_tokenizer
from command_line import cli
from test_end_to_end import _cut

from bass_cli.cli import doctor as machine
from bass_cli.config.job import load_pair, make_job
from bass_cli.errors import MachineError
from bass_cli.run.plan import make_plan
from bass_cli.sandbox.isolation import Isolation
from bass_cli.system.host import host_memory


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a pair file, elsewhere than where the command runs; no hub is
    asked."""
    write_checkpoint("llama", tmp_path / "pairs" / "model", shards=False)
    write_tokenizer(tmp_path / "pairs" / "model")
    (tmp_path / "pairs" / "mine.yaml").write_text("target: model\ndraft: lookup\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "pairs"


def test_doctor_and_pairs_describe_a_pair_file(place: Path) -> None:
    file = str(place / "mine.yaml")
    (row,) = json.loads(cli("pairs", file, "--json").stdout)
    assert (row["name"], row["here"], row["ready"]) == ("mine", "ready", True)
    lines = cli("pairs", file, "smollm2").stdout.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == ["pair", "mine", "smollm2"]
    facts = json.loads(cli("doctor", "--pair", file, "--json").stdout)
    assert (facts["pair"], facts["pair_ready"], facts["pair_here"]) == ("mine", True, "ready")
    assert "sequences of up to 256 new tokens" in facts["pair_rows"]
    counts = facts["pair_memory_bytes"]
    assert (
        sum(count for part, count in counts.items() if part not in ("needed", "free"))
        == (counts["needed"])
    )
    assert set(counts) >= {"weights", "prompts", "cache", "buffers", "graphs"}
    assert 0 < counts["weights"] < counts["needed"] <= counts["free"]
    assert "pair memory" in cli("doctor", "--pair", file).stdout
    same = json.loads(cli("doctor", "--model", str(place / "model"), "--json").stdout)
    assert [same[key] for key in ("pair", "pair_draft", "pair_ready")] == ["model", "lookup", True]
    assert "sequences of up to 256 new tokens" in same["pair_rows"]
    small = json.loads(cli("doctor", "--pair", file, "--kv-dtype", "fp8", "--json").stdout)
    assert small["pair_memory_bytes"]["prompts"] < counts["prompts"] / 2
    drafts = ["--pair", file, "--draft", str(place / "model"), "--dtype", "fp32", "--draft-dtype"]
    weights = [
        json.loads(cli("doctor", *drafts, dtype, "--json").stdout)["pair_memory_bytes"]["weights"]
        for dtype in ("fp32", "int8", "bf16")
    ]
    assert weights[0] > weights[2] > weights[1]
    assert "--draft-dtype needs --pair or --model" in cli("doctor", "--draft-dtype", "fp8").stderr
    (place / "fp8.yaml").write_text("target: model\ndraft: lookup\nkv_dtype: fp8\n")
    in_file = json.loads(cli("doctor", "--pair", str(place / "fp8.yaml"), "--json").stdout)
    assert in_file["pair_memory_bytes"]["cache"] == small["pair_memory_bytes"]["cache"]
    assert "--kv-dtype needs --pair" in cli("doctor", "--kv-dtype", "fp8").stderr
    theirs = json.loads(cli("doctor", "--pair", file, "--decoder", "transformers", "--json").stdout)
    assert theirs["pair_decoder"].endswith(": transformers' own layers")
    assert "--decoder needs --pair" in cli("doctor", "--decoder", "native").stderr
    assert "leave out the names of pairs" in cli("pairs", file, "--models").stderr
    eight, plain = (
        json.loads(cli("doctor", "--pair", file, "--dtype", dtype, "--json").stdout)
        for dtype in ("int8", "fp32")
    )
    bytes_of = [one["pair_memory_bytes"]["weights"] for one in (eight, plain)]
    assert bytes_of[0] < bytes_of[1]
    assert "--dtype needs --pair" in cli("doctor", "--dtype", "int8").stderr
    plain = json.loads(
        cli("doctor", "--model", str(place / "model"), "--draft", "none", "--json").stdout
    )
    assert (plain["pair_draft"], plain["pair_ready"]) == ("none", True)
    _cut(next((place / "model").glob("*.safetensors")))
    facts = json.loads(cli("doctor", "--pair", file, "--json").stdout)
    assert (facts["pair_ready"], "pair_rows" in facts) == (False, False)
    assert "safetensors: the file is truncated" in facts["pair_here"]
    (row,) = json.loads(cli("pairs", file, "--json").stdout)
    assert (row["ready"], "safetensors: the file is truncated" in row["here"]) == (False, True)
    (place / "mine.yaml").write_text("target: nowhere.gguf\n")
    table = cli("doctor", "--pair", file)
    assert "target: no such file or folder" in next(
        line for line in table.stdout.splitlines() if "pair here" in line
    )
    for command in (
        ["pairs", "none.yaml"],
        ["doctor", "--pair", "none.yaml"],
        ["doctor", "--model", "none.yaml"],
        ["doctor", "--draft", "none.yaml"],
    ):
        missing = cli(*command)
        assert (missing.exit_code, missing.stdout) == (2, "")
        assert {
            "--pair": "none.yaml: cannot read the pair file",
            "--model": "give it with --pair none.yaml",
            "--draft": "needs --pair or --model, the target that it drafts for",
        }.get(command[1], "cannot read") in missing.stderr


def test_options_that_no_variable_sets_name_none(place: Path) -> None:
    refused = cli("doctor", "--pair", str(place / "mine.yaml"), "--dtype", "int4")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--dtype: it should be 'auto'" in refused.stderr


def test_doctor_describes_the_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    facts = json.loads(cli("doctor", "--json").stdout)
    assert facts["cpu"].strip()
    assert facts["free_memory_bytes"] > 0
    if facts["device"] == "cpu":
        assert facts["free_memory_bytes"] <= facts["memory_bytes"] == host_memory().total
    assert facts["cache"] == "/dev/null/nowhere/bass, not writable"
    assert facts["temporary"].endswith("GB free")
    assert "HF_HUB_OFFLINE is set" in facts["hub"]
    assert facts["sandbox"]

    monkeypatch.setattr(Isolation, "weaknesses", lambda _: ["programs can fly: no gravity"])
    assert (
        machine._sandbox()
        .partition("; ")[2]
        .startswith(
            "weak, so running programs needs --allow-code-execution; programs can fly: no gravity"
        )
    )

    def refuse(**_: Any) -> None:
        raise MachineError("programs cannot be run on this system: why")

    monkeypatch.setattr("bass_cli.sandbox.programs.Sandbox", refuse)
    assert machine._sandbox() == "programs cannot be run on this system: why"


@pytest.fixture
def server() -> Iterator[str]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    found = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def test_whether_the_hub_can_be_reached(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(machine, "_PATIENCE", 30.0)  # seconds; a busy machine answers late
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server)
    assert machine._hub() == f"{server} can be reached"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert machine._hub().startswith("http://127.0.0.1:9 cannot be reached (")


def test_gpu_that_is_too_old_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes the CPU, with a note; `cuda` is an error with the reason."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "Tesla T4")
    reason = "Tesla T4 has compute capability 7.5, and bass needs 8.0 or later"
    file = str(place / "mine.yaml")
    facts = json.loads(cli("doctor", "--pair", file, "--json").stdout)
    assert (facts["device"], facts["kernels"], facts["pair_ready"]) == ("cpu", "plain torch", True)
    assert f"{reason}: the CPU is used" in make_plan(make_job(load_pair(file))).notes
    with pytest.raises(MachineError, match=f"`device` cuda: {reason}"):
        make_plan(make_job(load_pair(file), device="cuda"))
