"""Test memory: free memory, plans, refusals before weights are loaded, and allocations that fail
later."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_mask
from command_line import cli, rows_in
from test_kv_cache import store

import bass_kernels as ops
from bass_cli.bench.shapes import random_weights, spec_of
from bass_cli.config.job import Job, Speculation, load_pair
from bass_cli.config.sampling import Sampling
from bass_cli.engine.batch import beyond
from bass_cli.engine.loop import Loop
from bass_cli.errors import MachineError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.models.runner import Runner
from bass_cli.models.spec import Layouts, Norm, Rope, Spec
from bass_cli.run.build import build
from bass_cli.run.generate import generate
from bass_cli.run.manifest import describe
from bass_cli.run.memory import Extras, Footprint, MemoryNeed, UnitBytes, footprint
from bass_cli.run.plan import make_plan
from bass_cli.system import host
from bass_cli.system.host import HostMemory, host_memory, is_refused_memory

CPU = torch.device("cpu")
CONTEXT = 256
FLAGS = ("p.txt", "--pair", "pair.yaml", "--device", "cpu", "--out", "o.jsonl")


@pytest.fixture
def place(pair_folder: Any) -> Path:
    """The device of the tests."""
    return pair_folder(prompts=3, max_position_embeddings=CONTEXT)


def bass(*arguments: str, **settings: Any) -> Any:
    return cli("generate", *arguments, **settings)


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for module in ("plan", "memory"):
        monkeypatch.setattr(f"bass_cli.run.{module}.free_memory", lambda device: count)


def job(**fields: Any) -> Job:
    sampling = Sampling(
        **{key: fields.pop(key) for key in list(fields) if key in Sampling.model_fields}
    )
    return Job(
        pair=load_pair("pair.yaml"),
        sampling=sampling,
        device="cpu",
        speculation=Speculation(length=4),
        **fields,
    )


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


MEMINFO = {"proc/meminfo": "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n"}
V2, V1 = "sys/fs/cgroup/a/b/memory", "sys/fs/cgroup/memory/a/b/memory"


@pytest.mark.parametrize(("files", "total", "left"), [
    ({}, 1000, 600),
    ({"proc/self/cgroup": "0::/a/b\n", f"{V2}.max": "max\n", f"{V2}.current": "5\n"}, 1000, 600),
    ({"proc/self/cgroup": "0::/a/b\n", f"{V2}.max": str(500 << 10), f"{V2}.current": str(400 << 10),
      f"{V2}.stat": f"anon 7\ninactive_file {50 << 10}\n"}, 500, 150),
    ({"proc/self/cgroup": "0::/a/b/c\n", f"{V2}.max": str(500 << 10), f"{V2}.current": str(450 << 10)}, 500, 50),
    ({"proc/self/cgroup": "4:cpu,memory:/a/b\n0::/\n", f"{V1}.limit_in_bytes": str(300 << 10),
      f"{V1}.usage_in_bytes": str(100 << 10)}, 300, 200),
    ({"proc/self/cgroup": "4:memory:/a/b\n", f"{V1}.limit_in_bytes": str(2**63 - 4096),
      f"{V1}.usage_in_bytes": "9\n"}, 1000, 600),
    ({"proc/self/cgroup": "4:memory:/elsewhere\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(300 << 10),
      "sys/fs/cgroup/memory/memory.usage_in_bytes": str(350 << 10)}, 300, 0),
])  # fmt: skip
def test_control_groups_limit_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], total: int, left: int
) -> None:
    write_files(tmp_path, MEMINFO | files)
    monkeypatch.setattr(host, "ROOT", tmp_path)
    assert host_memory() == HostMemory(total << 10, left << 10)


def test_out_of_memory_errors_are_recognised() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    cuda = RuntimeError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
    )
    blas = RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )
    others = [
        RuntimeError(words)
        for words in (
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "CUDA driver error: out of memory",
            "Triton Error [CUDA]: out of memory",
            "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY",
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 8 bytes",
            "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes",
            "std::bad_alloc",
        )
    ]
    for error in (
        refused.value,
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        cuda,
        blas,
        *others,
        OSError(12, "Cannot allocate memory"),
    ):
        assert is_refused_memory(error), error
    for other in (
        RuntimeError("shape mismatch"),
        OSError(28, "No space left on device"),
        ValueError("out of memory"),
    ):
        assert not is_refused_memory(other), other


def test_the_largest_settings_fit_and_one_more_does_not() -> None:
    print_ = Footprint(
        weights=1000,
        graphs=60,
        buffers=30,
        prompts=10,
        prompt=50,
        row=UnitBytes(20, 10),
        token=UnitBytes(4, 3),
        context=64,
    )
    for free in (1100, 1136, 1137, 1200, 5000):
        for tokens in (1, 10, 63, 10**9):
            rows = print_.most_rows(tokens, free)
            assert rows == 0 or print_.bytes(rows, tokens) <= free
            assert print_.bytes(rows + 1, tokens) > free
        for rows in (1, 3):
            tokens = print_.most_tokens(rows, free)
            assert tokens == 0 or print_.bytes(rows, tokens) <= free
            assert tokens == 63 or print_.bytes(rows, tokens + 1) > free
    assert print_.bytes(2, 10**9) == print_.bytes(2, 63), "the context bounds what a row generates"
    assert print_.parts(3, 5, prompts=2) == {
        "weights": 1000,
        "prompts": 60,
        "cache": (3 + 1) * 20 + 3 * 5 * 4,
        "buffers": 30 + 3 * (10 + 5 * 3),
        "graphs": 60,
    }
    shared = print_.most_rows(10, 5000, samples=2)
    assert (
        print_.bytes(shared, 10, prompts=1 + shared / 2)
        <= 5000
        < print_.bytes(shared + 1, 10, prompts=2 + shared / 2)
    )


def _held(loop: Loop) -> int:
    """Return the bytes of caches and token buffers."""
    runners = [loop.target, *([loop.drafter.runner] if hasattr(loop.drafter, "runner") else [])]
    tokens = loop.batch.tokens
    return sum(runner.cache.bytes() for runner in runners) + tokens.numel() * tokens.element_size()


@pytest.mark.parametrize(
    ("draft", "kv_dtype"),
    [
        *((draft, "auto") for draft in ("draft", "parallel:draft", "skip:1", "none")),
        *((draft, "fp8") for draft in ("draft", "skip:1")),
    ],
)
def test_weights_and_caches_are_planned_to_the_byte(place: Path, draft: str, kv_dtype: str) -> None:
    """Rows and tokens add to the plan what they add to the tensors, except for work space."""
    (place / "pair.yaml").write_text(f"target: target\ndraft: {draft}\n")
    write_mask(place / "draft", 300)

    def both(rows: int, tokens: int) -> tuple[int, int]:
        wish = job(batch_size=rows, max_new_tokens=tokens, kv_dtype=kv_dtype)
        wish = wish.model_copy(
            update={"speculation": Speculation(length=4 if draft != "none" else 0)}
        )
        plan = make_plan(wish)
        return plan.footprint.bytes(rows, tokens), _held(build(plan))

    sizes = {(rows, tokens): both(rows, tokens) for rows in (2, 5) for tokens in (10, 60)}
    for planned, held in sizes.values():
        assert held < planned
    planned, held = (
        sizes[5, 60][i] - sizes[5, 10][i] - sizes[2, 60][i] + sizes[2, 10][i] for i in (0, 1)
    )
    heads, places = 6, {"none": 1, "parallel:draft": 8}.get(draft, 5)
    spec = open_checkpoint(place / "target").spec
    read = 2 * spec.kv_heads * spec.head_size * 4 if kv_dtype == "fp8" else 0
    assert planned - held == 3 * 50 * (16 + 8 * heads * places + read), (
        "two token ids; a head's scores and their exponentials; a layer's keys and values in float32"
    )


@pytest.mark.parametrize(("bias", "kv_dtype"), [(True, "fp8"), (True, "auto"), (False, "fp8")])
def test_a_note_says_that_eight_bits_suit_keys_with_biases_less(
    pair_folder: Any, bias: bool, kv_dtype: str
) -> None:
    pair_folder(prompts=1, attention_bias=bias)
    notes = make_plan(job(kv_dtype=kv_dtype)).notes
    noted = any(note.startswith("`kv_dtype` fp8: the keys of this model") for note in notes)
    assert noted == (bias and kv_dtype == "fp8")


def test_spans_end_with_the_context(place: Path) -> None:
    huge, bounded = make_plan(job(max_new_tokens=10**8)), make_plan(job(max_new_tokens=CONTEXT - 1))
    assert huge.span == bounded.span == CONTEXT - 1 + beyond(4)
    assert huge.footprint == bounded.footprint
    bass(*FLAGS, "--n", "1", "--limit", "2", "--max-new-tokens", "100000000", code=0)
    rows = rows_in(place / "o.jsonl")
    assert {row["finish_reason"] for row in rows} <= {"length", "eos"}
    assert all(
        row["prompt_tokens"] + row["tokens"] == CONTEXT
        for row in rows
        if row["finish_reason"] == "length"
    )


def test_job_that_cannot_fit_is_refused_and_its_remedy_fits(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bass_cli.run.build.load", lambda *a, **k: pytest.fail("weights were read"))
    longest = "the cat number 0 sat"
    found = make_plan(job(batch_size=6, max_new_tokens=100), longest_prompt=longest).footprint
    free(monkeypatch, int(found.bytes(6, 100) / 0.95) + 1000)
    for batch_size, new_tokens in ((100000, 100), (6, 10**8)):
        result = bass(*FLAGS, "--batch-size", str(batch_size), "--max-new-tokens", str(new_tokens))
        assert (result.exit_code, result.stdout) == (3, "")
        assert "Traceback" not in result.stderr
        assert not (place / "o.jsonl").exists()
    assert re.search(
        r"6 rows of up to 255 new tokens each: .* are free; .*--batch-size (\d+), or --max-new-tokens "
        r"(\d+)$",
        result.stderr.strip(),
    )
    assert (
        "--batch-size 6" in bass(*FLAGS, "--batch-size", "100000", "--max-new-tokens", "100").stderr
    )
    rows, tokens = map(int, re.findall(r"--(?:batch-size|max-new-tokens) (\d+)", result.stderr))
    make_plan(job(batch_size=rows, max_new_tokens=10**8), longest_prompt=longest)
    make_plan(job(batch_size=6, max_new_tokens=tokens), longest_prompt=longest)
    for more in (
        {"batch_size": rows + 1, "max_new_tokens": 10**8},
        {"batch_size": 6, "max_new_tokens": tokens + 1},
    ):
        with pytest.raises(MachineError):
            make_plan(job(**more), longest_prompt=longest)


def test_auto_batch_size_follows_the_plan(
    pair_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = pair_folder(prompts=3, max_position_embeddings=CONTEXT, num_hidden_layers=3)
    found = make_plan(job(n=20)).footprint
    free(monkeypatch, int(found.bytes(12, 256, prompts=12 / 20) / 0.95) + 1000)
    plan = make_plan(job(n=20))
    assert plan.rows == plan.most_rows == 12
    assert any("12 rows at a time, not 64" in note for note in plan.notes)
    assert 1 <= make_plan(job(n=20), longest_prompt="the cat sat on the mat " * 40).rows < 12, (
        "prompts take memory too"
    )
    assert make_plan(job(n=5, max_new_tokens=8), prompts=1).notes == ()
    free(monkeypatch, int(found.bytes(3, 30) / 0.95) + 1000)
    result = bass(*FLAGS, "--n", "9", "--limit", "1", "--max-new-tokens", "30")
    assert (result.exit_code, "rows at a time, not 9" in result.stderr) == (0, True)
    assert len((place / "o.jsonl").read_text().splitlines()) == 9
    free(monkeypatch, 1000)
    with pytest.raises(MachineError, match=r"the weights take .* use a smaller model"):
        make_plan(job())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("fields", "prompts", "due"), [
    ({"n": 2}, 164, {"cpu": 55, "cuda": 328}),
    ({"n": 16}, 164, {"cpu": 64, "cuda": 875}),
    ({"n": 1}, None, {"cpu": 64, "cuda": 1024}),
    ({"n": 1, "limit": 6}, None, {"cpu": 6, "cuda": 6}),
    ({"n": 3}, 3, {"cpu": 9, "cuda": 9}),
    ({"n": 2000}, 1, {"cpu": 63, "cuda": 1000}),
    ({"n": 20, "temperature": 0.0}, 4, {"cpu": 4, "cuda": 4}),
    ({"n": 20, "budget": 2.0}, 164, {"cpu": 20, "cuda": 20}),
    ({"n": 3, "batch_size": 17}, 2, {"cpu": 17, "cuda": 17}),
])  # fmt: skip
def test_job_takes_as_few_waves_as_possible(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fields: dict[str, Any],
    prompts: int | None,
    due: dict[str, int],
) -> None:
    """A small job draws all samples at once; a large one in equal waves of at most the best size."""
    free(monkeypatch, 1 << 50)
    plan = make_plan(job(max_new_tokens=20, **fields), prompts=prompts)
    plan = dataclasses.replace(plan, device=torch.device(kind))
    assert plan.rows == plan.unlimited_rows == due[kind]


def test_under_maximal_coupling_the_manifest_has_the_rows(place: Path) -> None:
    """Samples depend on the number of rows there."""
    for coupling, due in (("maximal", 9), ("shared", None)):
        wish = job(n=3).model_copy(update={"speculation": Speculation(coupling=coupling)})
        manifest = describe(make_plan(wish, prompts=3), {})
        assert manifest["results"].get("batch_size") == due


# The kinds of errors are tested above; this uses torch's and Python's.
@pytest.mark.parametrize("error", [
    lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: bytearray(1 << 60),
    pytest.param(lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
                 marks=pytest.mark.slow),
    pytest.param(lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
                                                            "`cublasCreate`")), marks=pytest.mark.slow),
], ids=["torch", "python", "cuda", "library"])  # fmt: skip
def test_out_of_memory_is_exit_code_3_and_keeps_lines(
    place: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    tokens = ("--max-new-tokens", "40")
    bass(*FLAGS, "--n", "4", *tokens, code=0)
    due = sorted(_samples(place / "o.jsonl"))
    written, round_, left = place / "o.jsonl", Loop.round, [300]

    def short(self: Loop, *given: Any, **named: Any) -> Any:
        left[0] -= 1
        if written.read_bytes().count(b"\n") >= 2 or not left[0]:
            error()
        return round_(self, *given, **named)

    monkeypatch.setattr(Loop, "round", short)
    result = bass(*FLAGS, "--n", "4", "--batch-size", "4", *tokens, "--overwrite")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "memory ran out with 4 rows; going on with 2" in result.stderr
    assert "memory ran out with 2 rows; going on with 1" in result.stderr
    assert (
        "memory ran out with 1 row of up to 40 new tokens; the largest that can be expected to "
        "fit: --max-new-tokens 20" in result.stderr
    )
    kept = written.read_bytes()
    assert kept.count(b"\n") >= 2
    monkeypatch.setattr(Loop, "round", round_)
    bass(*FLAGS, "--n", "4", "--batch-size", "2", *tokens, code=0)
    assert written.read_bytes().startswith(kept)
    assert sorted(_samples(written)) == due


def _steal(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Refuse memory in the middle of these passes."""
    forward, count = Runner.forward, itertools.count(1)

    def short(self: Runner, *given: Any, **named: Any) -> Any:
        if next(count) in calls:
            torch.empty(1 << 60, dtype=torch.uint8)
        return forward(self, *given, **named)

    monkeypatch.setattr(Runner, "forward", short)


@pytest.mark.parametrize(("flags", "calls"), [
    ((), (3, 20)), (("--draft", "lookup"), (1, 2)), (("--batch-size", "8"), (30, 31)),
    (("--temperature", "0", "--batch-size", "4"), (4, 9)),
], ids=str)  # fmt: skip
def test_a_job_that_runs_out_of_memory_twice_ends_with_the_same_lines(
    place: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], calls: tuple[int, int]
) -> None:
    flags = ("--n", "4", "--max-new-tokens", "24", *flags)
    bass(*FLAGS, *flags, code=0)
    due, written = sorted(_samples(place / "o.jsonl")), place / "o.jsonl"
    totals = json.loads((place / "o.jsonl.manifest.json").read_text())["totals"]
    _steal(monkeypatch, *calls)
    result = bass(*FLAGS, *flags, "--overwrite", "--verbose")
    assert (result.exit_code, result.stderr.count("memory ran out with")) == (0, 2)
    last = result.stderr.rindex("going on with ")  # these rows are what the share is of
    left, of = re.findall(r"(?:going on with|rows busy: \d+% of) (\d+)", result.stderr[last:])
    assert left == of
    assert sorted(_samples(written)) == due
    found = json.loads((place / "o.jsonl.manifest.json").read_text())["totals"]
    assert {key: found[key] for key in ("samples", "tokens", "finish_reasons")} == {
        key: totals[key] for key in ("samples", "tokens", "finish_reasons")
    }


def test_under_maximal_coupling_refused_memory_ends_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows would change the samples."""
    _steal(monkeypatch, 3)
    result = bass(*FLAGS, "--n", "4", "--coupling", "maximal", "--batch-size", "4")
    assert (result.exit_code, "going on" in result.stderr) == (3, False)
    assert "memory ran out with 4 rows of up to 255 new tokens each" in result.stderr


def test_failing_prompt_source_does_not_restart_the_job(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed source yields no more prompts, so a restarted job would lack lines."""

    def source() -> Iterator[str]:
        yield "the cat sat"
        raise MemoryError

    noted: list[str] = []
    wish = job(n=1, max_new_tokens=4, batch_size=3)
    with pytest.raises(MachineError, match="memory ran out"):
        list(generate(source(), wish, on_note=noted.append))
    assert noted == []


def test_unknown_free_memory_halves_the_plan(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    need = make_plan(job(batch_size=4, max_new_tokens=40)).memory_need
    monkeypatch.setattr("bass_cli.run.memory.free_memory", refuse)
    with (
        pytest.raises(MachineError, match=r"`batch_size` 2, or `sampling.max_new_tokens` 20$"),
        need.explained(),
    ):
        refuse()


def _samples(path: Path) -> list[tuple[str, int, str]]:
    return [(row["id"], row["sample"], row["text"]) for row in rows_in(path)]


def test_prompt_cache_that_cannot_grow_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = store()
    cache.reserve(900)
    # bytes of a position, keys and values of two layers
    each = cache.prompt_keys[0][:, :1].numel() * 4 * 4
    have = cache.positions
    monkeypatch.setattr("bass_cli.models.kv_cache.free_memory", lambda device: each * have)
    cache.reserve(500)
    assert cache.positions == 1408, "by whole units of what is needed, where twice is not there"
    monkeypatch.setattr("bass_cli.models.kv_cache.free_memory", lambda device: each * 100)
    before = cache.bytes()
    with pytest.raises(MemoryError, match="prompts need 2400 positions"):
        cache.reserve(1000)
    assert cache.bytes() == before


LLAMA_8B = Spec(
    family="llama",
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    head_size=128,
    inner=14336,
    vocab=128256,
    context=131072,
    norm=Norm("rms", 1e-5),
    activation="silu",
    gated=True,
    rope=Rope(5e5, 128),
    windows=(0,) * 32,
    query_scale=128**-0.5,
)


def test_plan_of_a_large_model_follows_its_sizes() -> None:
    """Llama 3.1 8B in bf16 on a GPU: 16.06 GB of weights, 131 kB a position."""
    found = footprint(LLAMA_8B, None, dtype=torch.bfloat16, device=torch.device("cuda"), longest=16)
    assert found.weights == pytest.approx(16.06e9, rel=0.001)
    assert found.token.cache == 131072
    need = MemoryNeed(found, 64, 10**9, torch.device("cuda"))
    assert found.bytes(need.rows, need.new_tokens) == pytest.approx(
        64 * 131072 * 131072 + 16.06e9, rel=0.02
    )


def test_keys_in_eight_bits_make_room_for_nearly_twice_the_rows() -> None:
    """Llama 3.1 8B on a GPU of 80 GB, contexts of 8,000 tokens."""
    found = [
        footprint(
            LLAMA_8B, None, dtype=torch.bfloat16, device=torch.device("cuda"), longest=0,
            prompt_tokens=4000, eight_bits=eight_bits,
        )
        for eight_bits in (False, True)
    ]  # fmt: skip
    assert [one.token.cache for one in found] == [131072, 131072 * 130 // 256]
    plain, small = (one.most_rows(4000, 76 << 30, samples=1) for one in found)
    assert 1.9 < small / plain < 2.0


def test_plan_of_a_mixture_counts_every_expert() -> None:
    """Qwen3-30B-A3B in bf16: 61.06 GB of weights; with tiny sizes, to the byte."""
    large = spec_of("qwen3-30b-a3b", option="--shape")
    cuda = torch.device("cuda")
    found = footprint(large, None, dtype=torch.bfloat16, device=cuda, longest=0)
    assert found.weights == pytest.approx(61.06e9, rel=0.001)
    assert footprint(
        large, None, dtype=torch.bfloat16, device=cuda, longest=0, ranks=2
    ).weights == pytest.approx(61.06e9 / 2, rel=0.01)
    tiny, cpu = spec_of("tiny-moe", option="--shape"), torch.device("cpu")
    weights = random_weights(tiny, dtype=torch.float32, device=cpu, seed=0)
    planned = footprint(tiny, None, dtype=torch.float32, device=cpu, longest=0)
    assert planned.weights == sum(one.nbytes for one in weights.values())


@pytest.mark.parametrize("layout", ["int8", "fp8"])
def test_plan_of_a_mixture_in_8_bits_counts_bytes_of_experts(layout: str) -> None:
    tiny, cpu = spec_of("tiny-moe", option="--shape"), torch.device("cpu")
    words: dict[str, Any] = {"dtype": torch.float32, "device": cpu, "layouts": Layouts(layout)}
    weights = random_weights(tiny, seed=0, **words)
    planned = footprint(tiny, None, longest=0, **words)
    assert planned.weights == sum(one.nbytes for one in weights.values())
    plain = footprint(tiny, None, longest=0, **words | {"layouts": Layouts()})
    assert planned.weights < plain.weights / 2


@pytest.mark.slow  # starting the profiler takes two seconds
def test_planned_memory_covers_what_reports_allocate() -> None:
    """Reports of the likeliest tokens, as torch's profiler sees them."""
    places, vocab = 5, 151_936

    def planned(top: int) -> int:
        """Return the bytes of a row's work with reports of this size."""
        found = footprint(
            dataclasses.replace(LLAMA_8B, vocab=vocab), None, dtype=torch.float32, device=torch.device("cpu"),
            longest=places - 1, extras=Extras(top=top),
        )  # fmt: skip
        return found.row.buffers

    logits = torch.randn(places, vocab, generator=torch.Generator().manual_seed(1))
    tokens, scores = torch.zeros(places, dtype=torch.int64), torch.zeros(places)
    for top in (5, 64):
        with torch.profiler.profile(profile_memory=True) as profiler:
            ops.report_entries(logits, tokens, scores, top)
        live = peak = 0
        for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        assert peak <= 1.1 * (planned(top) - planned(0))
    assert planned(64) < 1.6 * planned(0)
