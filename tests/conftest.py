"""Shared fixtures. Without a CUDA device, Triton kernels run in its interpreter, which must be
set before triton is imported."""

import atexit
import errno
import functools
import gc
import itertools
import os
import stat
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import typer.testing

import bass_kernels as ops

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Models are tiny, and processes of tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Compiled files are kept in __pycache__, which git ignores, also where the environment says not to
# write them: every process of the tests would compile the tests, or the package, again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The settings of who runs the tests are not those of the tests.
for name in [name for name in os.environ if name.startswith("BASS_")]:
    del os.environ[name]


# Files whose tests take longest, 4 to 25 s each. They start first; otherwise one process still runs
# them when all others are done.
LONGEST = (
    "test_guides", "test_exactness", "test_tensor_parallel", "test_eval", "test_hostile_text",
    "test_parallel", "test_exact_quantised", "test_laws", "test_tokenizer", "test_compiling",
    "test_controllers", "test_feature_heads", "test_sandbox", "test_plus", "test_checks",
    "test_end_to_end", "test_sandbox_parts", "test_prompt_format", "test_command", "test_growth",
    "test_pieces", "test_ahead", "test_memory", "test_any_model", "test_any_jobs", "test_hybrids",
    "test_exchange", "test_interruption", "test_eight_bits", "test_task_files", "test_library",
    "test_parity", "test_bench", "test_updates", "test_signals", "test_crashes",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish():
    """Exclude imported objects from garbage collection. The collector would scan a million of them
    again and again, a twentieth of the time of all tests, and pytest does so before it ends."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    atexit.register(gc.unfreeze)  # some libraries check for objects that were not freed


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    """Make Triton's interpreter faster, where it is used. Returns the patch."""
    pytest.importorskip("triton")
    from fast_interpreter import speed_up

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            speed_up(patch)
        yield patch


@pytest.fixture(scope="session")
def profiles(tmp_path_factory):
    """An iterator of paths of folders that do not exist yet."""
    place = tmp_path_factory.mktemp("profiles")
    return (place / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_profiles(profiles, monkeypatch):
    """Keep profiles of this machine out of tests, and profiles of tests out of other tests."""
    place = next(profiles)
    monkeypatch.setattr("bass_cli.lengths.surface.profile_folder", lambda: place)


@pytest.fixture(autouse=True)
def default_kernels():
    """Choose kernels by device again after a test that chose others."""
    yield
    ops.use(None)
    ops.attention_schedule("ragged")


@pytest.fixture
def now(monkeypatch):
    """Return the time of the clock, which the test sets, as a list of one number."""
    found = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Use a cache of converted tokenizers for this session only, also in its child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks():
    """Do not wait until files are on the disk: no test cuts the power of this process. What the
    system refuses to sync is refused."""

    def fsync(descriptor):
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_command_line():
    """Build the parser of the command line once. It takes 20 ms, and tests use it thousands of
    times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_children():
    """Call tokenizers, templates and rules in this process, as systems other than Linux do. A fork
    of a process that has imported all tests takes 50 ms, and tests would make thousands. Commands
    in processes of their own have the children, and so have tests with the fixture `children`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bass_cli.formats.limits.IN_CHILD", False)
        yield


@pytest.fixture
def children(monkeypatch):
    """Call tokenizers, templates and rules in child processes, which have limits."""
    monkeypatch.setattr("bass_cli.formats.limits.IN_CHILD", sys.platform == "linux")


@pytest.fixture(scope="module")
def sandbox_folders(tmp_path_factory):
    """A temporary folder for a module's sandboxes, writable by every user and used by no other
    test."""
    # created first, because its place depends on TMPDIR at its first use and it must outlive this
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        Path(place).chmod(0o1777)
        patch.setenv("TMPDIR", place)
        patch.setattr(tempfile, "tempdir", place)
        yield Path(place)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stand_in(monkeypatch, here):
    """Replace the engine by a stand-in, in a folder with prompts and a pair file; returns the jobs
    that it ran."""
    import stand_in

    import bass_cli.run

    for name in ("plan", "engine"):
        monkeypatch.setitem(sys.modules, f"bass_cli.run.{name}", None)
        monkeypatch.setattr(bass_cli.run, name, None, raising=False)
    stand_in.install()
    stand_in.loaded.clear()
    (here / "p.jsonl").write_text('{"prompt": "a"}\n{"id": "b", "prompt": "B", "level": 1}\n')
    (here / "pair.yaml").write_text(
        "target: t\ndraft: d\nsampling: {temperature: 0.3, top_p: 0.5, seed: 9}\n"
    )
    return stand_in.loaded


@pytest.fixture
def scored_stand_ins(monkeypatch, tmp_path):
    """Replace the tasks and the sandbox of scoring by stand-ins, in an empty folder; returns the
    tasks."""
    from scored import install, small_tasks

    tasks = small_tasks()
    install(monkeypatch, tmp_path, *tasks)
    return tasks


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a tiny random model and its tokenizer, which no test changes."""
    from checkpoints import write_checkpoint, write_tokenizer

    folder = tmp_path_factory.mktemp("models") / "model"
    write_checkpoint("llama", folder, shards=False, num_hidden_layers=2)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def pair_folder(here):
    """A function that makes a folder with a target, a draft and a pair file (see
    checkpoints.write_pair), which is the working directory."""

    def make(**given):
        from checkpoints import write_pair

        write_pair(here, **given)
        return here

    return make
