"""Other systems: another platform, unusual homes, temporary folders and locales.

Nothing ends in a traceback.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint, write_tokenizer

from bass_cli.errors import MachineError
from bass_cli.io import cache, readers
from bass_cli.run import plan
from bass_cli.sandbox.programs import work_folder
from bass_cli.system import host

ROOT = Path(__file__).parents[2]
RUN = "from bass_cli.cli.commands import main; main()"
ELSEWHERE = """
import sys, sysconfig, pydantic.fields, typer  # what asks for the platform itself is there before it changes
sysconfig.get_config_vars()
sys.platform = "win32"
"""
NO_LOCKS = "import sys; sys.modules['fcntl'] = None; "
NOBODY = """
import pwd
def unknown(user): raise KeyError(f"getpwuid(): uid not found: {user}")
pwd.getpwuid = unknown
"""  # a user without an entry in /etc/passwd, as in a container started with --user
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def bass(
    code: str, *arguments: str, folder: Path, stdin: bytes = b"", **variables: str | None
) -> Any:
    """`bass ARGUMENTS` in a process of its own after `code`; a variable that is None is not set."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    wanted = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
        **variables,
    }
    given = {
        name: value
        for name, value in wanted.items()
        if value is not None and not name.startswith("BASS_")
    }
    command = [sys.executable, "-c", code + RUN, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=given, input=stdin, capture_output=True, timeout=240
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
    return done


@pytest.mark.parametrize(("code", "says"), [
    (ELSEWHERE, b"bass runs on Linux and macOS, and this system is win32 (on Windows, use WSL)"),
    (NO_LOCKS, b"Python has no module fcntl"),
])  # fmt: skip
def test_unsupported_systems_get_an_error_that_names_supported_ones(
    tmp_path: Path, code: str, says: bytes
) -> None:
    assert bass(code, "--version", folder=tmp_path).stdout.startswith(b"bass ")
    assert b"--max-new-tokens" in bass(code, "generate", "--help", folder=tmp_path).stdout
    done = bass(code, "generate", "p.txt", folder=tmp_path)
    assert (done.returncode, done.stdout) == (3, b"")
    assert says in done.stderr


def test_the_readme_names_the_systems() -> None:
    line = next(
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("| systems |")
    )
    assert all(name in line for name in ("Linux", "macOS", "WSL"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair and a prompt file beyond ASCII, and links to them that are not."""
    folder = tmp_path_factory.mktemp("systems")
    write_checkpoint("llama", folder / "model", shards=False)
    write_tokenizer(folder / "model")
    (folder / "päir.yaml").write_text("target: model\ndraft: lookup\n", encoding="utf-8")
    (folder / "pröm.txt").write_text("thé cat sat\n", encoding="utf-8")
    (folder / "pair.yaml").symlink_to("päir.yaml")
    return folder


@pytest.mark.parametrize(("code", "variables", "source", "pair"), [
    (NOBODY, {"HOME": None, "XDG_CACHE_HOME": None, "TMPDIR": "/nowhere", "LC_ALL": "C"}, "pröm.txt", "päir.yaml"),
    pytest.param(
        "", ASCII | {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": None, "TMPDIR": "/proc"}, "-", "pair.yaml",
        marks=pytest.mark.slow),
], ids=["no home, no temporary folder", "neither can be written, ASCII"])  # fmt: skip
def test_a_job_runs_with_any_home_and_locale(
    place: Path, code: str, variables: dict[str, str | None], source: str, pair: str
) -> None:
    flags = ("--pair", pair, "--n", "1", "--max-new-tokens", "3", "--device", "cpu", "--stop", "ß")
    stdin = b"" if source != "-" else (place / "pröm.txt").read_bytes()
    done = bass(
        code,
        "generate",
        source,
        *(flags if source != "-" else flags[:-2]),
        folder=place,
        stdin=stdin,
        **variables,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] >= 1


def test_a_file_name_that_the_locale_cannot_encode_is_a_user_error(place: Path) -> None:
    assert (
        bass("", "generate", "pröm.txt", "--pair", "päir.yaml", folder=place, **ASCII).returncode
        == 2
    )


def test_a_user_without_a_home_has_a_temporary_cache_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert cache.cache_folder() == Path(tempfile.gettempdir()) / f"bass-{os.getuid()}"


def test_kernels_are_cached_elsewhere_if_the_home_is_not_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    cache.prepare_kernel_cache()
    assert "TRITON_CACHE_DIR" not in os.environ, "Triton's own place is good"
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "below"))
    monkeypatch.setenv(
        "TRITON_CACHE_DIR", "to be taken back"
    )  # what the call below sets goes with this test
    monkeypatch.delenv("TRITON_CACHE_DIR")
    cache.prepare_kernel_cache()
    assert cache.is_writable(Path(os.environ["TRITON_CACHE_DIR"]))


def test_kernels_add_products_without_rounding_unless_the_environment_forbids_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knobs = pytest.importorskip("triton.knobs")
    if not hasattr(knobs.language, "fp_fusion_enabled"):
        pytest.skip("Triton before 3.9")
    monkeypatch.setattr(plan, "gpu_fault", lambda: None)
    monkeypatch.setattr(plan, "prepare_kernel_cache", lambda: None)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    plan.device_of("auto")
    assert not knobs.language.fp_fusion_enabled(None)
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan.device_of("auto").type == "cuda"
        assert knobs.language.fp_fusion_enabled(None)


def test_no_writable_temporary_folder_is_one_error_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    monkeypatch.setattr(readers, "IN_MEMORY", 10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a prompt\n" * 10)))
    with pytest.raises(
        MachineError, match=r"stdin: input of more than .* set TMPDIR to a folder with free space"
    ):
        readers.open_source("-")
    with (
        pytest.raises(MachineError, match=r"programs need a temporary folder: .* set TMPDIR"),
        work_folder((0, 0)),
    ):
        pass


@pytest.mark.parametrize(
    ("named", "node", "expected"),
    [(None, "nvidiactl", 1), ("cuda", "dxg", 1), ("cpu", "nvidiactl", 0), (None, "null", 0)],
)
def test_a_context_is_created_in_a_thread_if_there_may_be_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, node: str, expected: int
) -> None:
    created: list[threading.Thread] = []
    monkeypatch.setattr(host, "_retain_context", lambda: created.append(threading.current_thread()))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / node).touch()
    before = set(threading.enumerate())
    monkeypatch.setattr(host, "ROOT", tmp_path)
    host.expect(named)
    for one in set(threading.enumerate()) - before:
        one.join(60)
    assert len(created) == expected
    assert threading.main_thread() not in created


class CudaDriver:
    """libcuda with one GPU. `code`: what cuInit returns."""

    def __init__(self, code: int = 0):
        self.code, self.retained = code, list[int]()

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.code

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = 7 + ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        self.retained.append(device.value)
        return 0


@pytest.mark.parametrize(("code", "expected"), [(0, [7]), (100, [])])
def test_the_context_of_the_first_gpu_is_created_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: list[int]
) -> None:
    driver = CudaDriver(code)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    host.expect(None)
    assert "CUDA_MODULE_LOADING" not in os.environ, "there is no GPU"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # so that it is unset afterwards
    before = set(threading.enumerate())
    host.expect("cuda")
    for one in set(threading.enumerate()) - before:
        one.join(60)
    assert driver.retained == expected


def test_the_driver_is_started_in_a_thread_before_actors_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []
    monkeypatch.setattr(host, "visible_gpus", lambda: started.append(threading.current_thread()))
    monkeypatch.setattr(host, "ROOT", tmp_path)
    host.expect_gpus(None)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    host.expect_gpus("cpu")
    assert started == []
    before = set(threading.enumerate())
    host.expect_gpus(None)
    for one in set(threading.enumerate()) - before:
        one.join(60)
    assert len(started) == 1
    assert threading.main_thread() not in started


def test_a_machine_without_a_driver_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    host._retain_context()
    assert host.visible_gpus() == []


@pytest.mark.parametrize(("free", "expected"), [(10_000, 2), (2_000, 0)])
def test_files_are_read_ahead_if_they_fit_into_half_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    files = [tmp_path / name for name in ("a", "b", "missing")]
    for file in files[:2]:
        file.write_bytes(bytes(1000 if file.name == "a" else 400))
    advised: list[tuple[int, int, int]] = []

    def advise(descriptor: int, *given: int) -> None:
        assert os.fstat(descriptor).st_size == given[1]
        advised.append(given)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(host, "host_memory", lambda: host.HostMemory(free, free))
    before = set(threading.enumerate())
    host.read_ahead(lambda: files)
    for one in set(threading.enumerate()) - before:
        one.join(60)
    assert len(advised) == expected
    assert all(given[2] == os.POSIX_FADV_WILLNEED for given in advised)


@pytest.mark.parametrize("broken", [False, True])
def test_waking_a_device_ignores_errors(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    asked: list[tuple[torch.device, threading.Thread]] = []

    def ask(device: torch.device) -> tuple[int, int]:
        asked.append((device, threading.current_thread()))
        if broken:
            raise RuntimeError("CUDA error: unknown")
        return 5, 7

    def digest() -> str:
        digested.append(threading.current_thread())
        if broken:
            raise FileNotFoundError("libtriton.so")
        return "digest"

    digested: list[threading.Thread] = []
    unseen: list[object] = []  # what a thread ends with
    monkeypatch.setattr(threading, "excepthook", unseen.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    monkeypatch.setattr("triton.runtime.cache.triton_key", digest)
    for begin in (host.wake, host.digest_triton):
        begin(torch.device("cpu"))
    assert asked == digested == []
    cuda = torch.device("cuda")
    for begin in (host.wake, host.digest_triton):
        begin(cuda)
    while not (asked and digested):
        time.sleep(0.001)
    ((device, thread),) = asked
    for one in (thread, *digested):
        one.join(60)
        assert not one.is_alive()
    assert (device, thread.daemon) == (cuda, False)
    assert thread is not threading.main_thread()
    assert unseen == []


@pytest.mark.parametrize("kilobytes", [40_000, 400_000, 700_000])
def test_too_little_address_space_is_one_sentence_and_exit_code_3(
    place: Path, kilobytes: int
) -> None:
    """Some libraries, such as OpenBLAS, end the process if they get no memory."""
    command = [sys.executable, "-m", "bass_cli", "generate", "pröm.txt", "--pair", "pair.yaml"]
    limited = ["bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "bash", *command]
    done = subprocess.run(limited, cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("bass: error: ")
    assert "memory" in line or "ulimit -v" in line


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        OSError(11, "Resource temporarily unavailable"),
    ],
)
def test_memory_errors_of_loader_and_threads_are_recognised(error: Exception) -> None:
    assert host.is_refused_memory(error)
    assert not host.is_refused_memory(ImportError("No module named 'torch'"))
