"""Without a CUDA device, Triton kernels run through its interpreter: chosen before anything
imports triton."""

import gc
import inspect
import itertools
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Files whose few tests take longest, 9 to 37 s each: begun first, or one process is left with them
# when all others have nothing to do.
DEAR = (
    "test_rays", "test_tensor_parallel", "test_triton", "test_sandbox_parts", "test_laws",
    "test_sandbox", "test_bench", "test_pieces", "test_weights", "test_memory", "test_crashes",
    "test_growth", "test_feature_heads", "test_systems", "test_chain_heads", "test_actors",
    "test_exchange",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(DEAR)}
    items.sort(key=lambda item: place.get(item.path.stem, len(DEAR)))


def pytest_collection_finish():
    """What was imported stays: a million objects that the collector would look through again and
    again, a twentieth of all tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_unconfigure():
    gc.unfreeze()  # some libraries look what was not given back


@pytest.fixture(scope="session", autouse=True)
def no_idle_checks():
    """Sums and products of kernels' integers are computed twice to see that they fit, a quarter
    of the interpreter's time, and what is found is thrown away unless its builder debugs, which
    it never does."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="session", autouse=True)
def builtins_found_once():
    """The interpreter looks through all of Triton's language for builtins at every call of a
    device function; which they are does not change, only whether they are patched by now."""
    if torch.cuda.is_available():  # nothing is interpreted
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = interpreter.tl
    places = (
        language, language.core, language.tensor, language.math,
        language.core.tensor_descriptor_base,
    )  # fmt: skip
    builtins = {
        place: [one for one in inspect.getmembers(place) if language.core.is_builtin(one[1])]
        for place in places
    }
    assert len(builtins[language]) > 50

    def patch_builtins(place, builder, scope):
        for name, member in builtins[place]:
            if getattr(place, name) is member:
                interpreter._patch_attr(place, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtins)
        yield


@pytest.fixture(scope="session")
def profiles(tmp_path_factory):
    """Folders that are not there yet, one after the other."""
    place = tmp_path_factory.mktemp("profiles")
    return (place / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_profiles(profiles, monkeypatch):
    """Profiles of this machine reach no test, and those that tests leave reach nothing else."""
    place = next(profiles)
    monkeypatch.setattr("bass_cli.lengths.profiles.folder", lambda: place)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Tokenizers are converted for this session only, in its processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def sandbox_folders(tmp_path_factory):
    """Where a module's sandboxes make their folders: every user may, and nobody else does at the
    same time."""
    # lies where temporary files do when it is first asked for, and shall outlive this
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        Path(place).chmod(0o1777)
        patch.setenv("TMPDIR", place)
        patch.setattr(tempfile, "tempdir", place)
        yield Path(place)


@pytest.fixture
def pair_folder(tmp_path, monkeypatch):
    """Makes a folder with a target, a draft and a pair file (see checkpoints.write_pair), in
    which the test then runs, without any BASS_ variable."""

    def make(**given):
        from checkpoints import write_pair

        write_pair(tmp_path, **given)
        for name in [name for name in os.environ if name.startswith("BASS_")]:
            monkeypatch.delenv(name)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return make
