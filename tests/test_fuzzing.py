"""Files that were damaged or made up at random: each is either read, or refused with an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bass_cli.job import UserError, load_pair

# The same examples on every machine and in every run; a test's own folder is used again by all of them.
FUZZ = settings(max_examples=200, deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

PAIR = b"""name: &n mine
target: ./model  # a folder
draft: skip:4-9,12
dtype: bf16
tokenizer: "\\u00e4"
speculation: {length: 4, max: 32, coupling: shared, draft_temperature: 0.5}
sampling:
  temperature: 1e-1
  stop: ['a', "\\n", *n]
  seed: 0x1F
"""
BITS = [b"&a", b"*n", b"<<: ", b"? ", b"- ", b"[", b"{", b"!!int ", b"!!binary ", b"!!set ", b"2001-99-99", b"1:1:1", b"\t",
        b"\0", b"\xff", b"|", b">", b"'", b'"', b"%YAML 1.2\n", b"---\n", b"9" * 5000, b"0x" + b"f" * 5000, b"\n", b"null",
        b"1e999", b".inf", b"\\ud800", b"skip:\xc2\xb2", b"#", b": ", b",", b"}", b"]", b"true"]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, bits: list[bytes]) -> bytes:
    """The bytes with up to six places overwritten, or cut out, or with something put in; and perhaps cut off."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 8))
        content[at : at + length] = draw(st.one_of(st.sampled_from(bits), st.binary(max_size=8)))
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 4)) == 0 else content)


def assert_read_or_named(read: Callable[[], object], file: Path) -> None:
    """Whatever else is raised than an error in one line that names the file is a fault of ours."""
    try:
        read()
    except UserError as error:
        found = str(error)
        assert str(file) in found, found
        assert "\n" not in found, found


@FUZZ
@given(content=damaged(PAIR, BITS))
def test_pair_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "pair.yaml"
    file.write_bytes(content)
    assert_read_or_named(lambda: load_pair(str(file)), file)
