"""Caches are read only if no other user can have written them; otherwise entries are remade."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import write_tokenizer
from hostile_text import FILE, check_harmless

from bass_cli.formats import tokenizer
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.io import cache
from bass_cli.io.cache import read_cached, write_cached
from bass_cli.lengths.surface import load_surface

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users need root")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder below a new XDG_CACHE_HOME; it does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(cache._SHARED, "")
    (tmp_path / "xdg").mkdir()
    return tmp_path / "xdg" / "bass"


def of_another_user(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)


def writable_by_its_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o775)


def writable_by_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def link_of_another_user(folder: Path) -> None:
    place = folder.parent.parent / "place"
    place.mkdir()
    folder.symlink_to(place)
    os.chown(folder, OTHER, OTHER, follow_symlinks=False)


def link_to_another_users_folder(folder: Path) -> None:
    place = folder.parent.parent / "place"
    of_another_user(place)
    folder.symlink_to("../place")


def in_another_users_folder(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder.parent, OTHER, OTHER)


def in_a_folder_that_all_may_write_to(folder: Path) -> None:
    folder.mkdir()
    folder.parent.chmod(0o777)


@pytest.mark.parametrize(
    "put",
    [
        writable_by_its_group,
        writable_by_all,
        in_a_folder_that_all_may_write_to,
        *(
            pytest.param(one, marks=as_root)
            for one in (
                of_another_user,
                link_of_another_user,
                link_to_another_users_folder,
                in_another_users_folder,
            )
        ),
    ],
)
def test_a_cache_folder_that_others_can_write_to_is_not_used(
    put: Callable[[Path], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(folder)
    (folder / "entry").write_bytes(b"forged")
    found = cache.cache_folder()
    assert found != folder
    status = found.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o700)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bass: cache folder {folder} is not used: ")
    assert cache.cache_folder() == found
    child = "from bass_cli.io.cache import cache_folder; print(cache_folder())"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{found}\n", "")
    assert capsys.readouterr().err == ""
    with pytest.raises(PermissionError):
        read_cached(folder / "entry", 100)
    with pytest.raises(PermissionError):
        write_cached(folder / "new", b"ours")
    notes: list[str] = []
    assert load_surface(folder / "entry", notes.append) is None
    assert "this profile is ignored: " in notes[0]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    cache.prepare_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(found / "triton")
    cache._remove(found, os.getpid())


def own(folder: Path) -> None:
    folder.mkdir(0o700)


def link_of_ones_own(folder: Path) -> None:
    own(folder.parent.parent / "place")
    folder.symlink_to(folder.parent.parent / "place")


def sticky_parent(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    own(folder)


@pytest.mark.parametrize("put", [own, link_of_ones_own, sticky_parent, lambda folder: None])
@pytest.mark.parametrize("mask", [0, 0o002, 0o077])
def test_an_own_cache_folder_is_used_and_entries_are_private_for_any_umask(
    put: Callable[[Path], None], mask: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder)
    os.umask(mask)
    assert cache.cache_folder() == folder
    entry = folder / "kind" / "entry"
    write_cached(entry, b"ours")
    assert read_cached(entry, 100) == b"ours"
    assert [one.stat().st_mode & 0o777 for one in (entry.parent, entry)] == [0o700, 0o600]
    assert capsys.readouterr().err == ""
    entry.chmod(0o666)
    with pytest.raises(PermissionError):
        read_cached(entry, 100)


@pytest.mark.parametrize("linked", ["XDG_CACHE_HOME", "a link's target"])
def test_dot_dot_after_a_symbolic_link_is_resolved_as_by_the_system(
    linked: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "open" / "inner"
    place.mkdir(parents=True)
    link = tmp_path / "xdg" / "link"
    link.symlink_to(place)
    if linked == "XDG_CACHE_HOME":
        monkeypatch.setenv("XDG_CACHE_HOME", str(link / ".." / "cache"))
    else:
        folder.symlink_to(Path("link", "..", "cache", "bass"))
    real = tmp_path / "open" / "cache" / "bass"
    real.mkdir(parents=True)
    assert Path(os.path.realpath(cache.cache_folder())) == real
    (tmp_path / "open").chmod(0o777)
    found = cache.cache_folder()
    assert Path(os.path.realpath(found)) not in (real, *real.parents)
    cache._remove(found, os.getpid())


def test_a_note_about_a_hostile_path_is_one_harmless_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder.parent / FILE
    place.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    writable_by_all(place / "bass")
    cache._remove(cache.cache_folder(), os.getpid())
    said = capsys.readouterr().err
    check_harmless(said)
    assert said.count("\n") == 1
    assert "(to fix it: chmod go-w " in said


def test_the_fresh_folder_is_removed_at_the_end(folder: Path) -> None:
    writable_by_all(folder)
    code = "from bass_cli.io.cache import cache_folder; print(cache_folder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() != str(folder)
    assert done.stderr.count("\n") == 1
    assert not Path(done.stdout.strip()).exists()


def test_nothing_is_cached_without_a_private_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writable_by_all(folder)
    monkeypatch.setattr(cache, "_make_temporary", lambda: None)
    place = cache.cache_folder() / "kind" / "entry"
    assert "nothing is cached" in capsys.readouterr().err
    for act in (lambda: write_cached(place, b""), lambda: read_cached(place, 9)):
        with pytest.raises((NotADirectoryError, PermissionError)):
            act()


@as_root
def test_another_users_entry_does_not_change_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    expected = Tokenizer.load(model).encode("the cat sat")
    (entry,) = (folder / "tokenizers").iterdir()
    key = entry.stem
    settled = tokenizer._parse(entry.read_bytes(), key)
    content = json.loads(settled.content)
    vocabulary = content["model"]["vocab"]
    turned = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    content["model"]["vocab"] = turned
    forged = settled._replace(content=json.dumps(content).encode())
    entry.write_bytes(tokenizer._entry(forged, key))
    assert Tokenizer.load(model).encode("the cat sat") != expected  # it would be believed
    os.chown(entry, OTHER, OTHER)
    assert Tokenizer.load(model).encode("the cat sat") == expected


@pytest.mark.parametrize(
    "change",
    [
        {"size": "9"},
        {"special": ["x"]},
        {"special": {"bos_token": 3}},
        {"eos_id": 1.5},
        {"template": 3},
        {"literal": None},
        {"vocabulary": None},
        {"more": 1},
        None,
    ],
)
def test_a_cache_entry_of_another_shape_is_replaced(
    change: object, folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    expected = Tokenizer.load(model)
    (entry,) = (folder / "tokenizers").iterdir()
    whole = entry.read_bytes()
    _, facts, content = whole.split(b"\n", 2)
    other = json.loads(facts) | change if isinstance(change, dict) else [1]
    rest = json.dumps(other).encode() + b"\n" + content
    entry.write_bytes(tokenizer._sum(entry.stem, rest) + b"\n" + rest)
    assert Tokenizer.load(model).cached == expected.cached
    assert entry.read_bytes() == whole
