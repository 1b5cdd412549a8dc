"""Read the records of a prompt file, by format: pairs of a line (or row) number and a JSON value.

Every reader yields one record at a time. Prompts are made of records in io/prompts.py.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from bass_cli.errors import UserError, nearest
from bass_cli.io.hub import refusal
from bass_cli.io.reading import shown

Records = Iterator[tuple[int, Any]]
BOM = b"\xef\xbb\xbf"
_PATIENCE = 20.0  # seconds to wait for the hub's first answer
# bytes; a million tokens take some 5 MB, and several copies of a line are in memory
LONGEST_LINE = 64 * 2**20
# bytes of a .json file; the whole file and its values are in memory
_LONGEST_LIST = 2**30
SPLITS = ("train", "validation", "test", "dev")


def format_of(lines: Iterable[bytes]) -> str:
    """Guess the format of input without a file name from its first line that is not blank.

    "{" means JSON lines. "[" followed by an object, a string or nothing means JSON. All else is
    text, such as "[INST]".
    """
    start = next((line.lstrip(BOM + b" \t") for line in lines if line.strip(BOM + b" \t\r\n")), b"")
    if start.startswith(b"{"):
        return "jsonl"
    listed = start.startswith(b"[") and start[1:].lstrip()[:1] in (b"{", b'"', b"")
    listed = listed or start.strip() == b"[]"
    return "json" if listed else "txt"


def _text_lines(
    stream: IO[bytes], name: str, *, longest: int = LONGEST_LINE
) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, from 1, without a byte-order mark at the start.

    UserError at a line of more than `longest` bytes; no more of it is read.
    """
    for number, raw in enumerate(iter(functools.partial(stream.readline, longest + 1), b""), 1):
        if len(raw) > longest:
            raise UserError(
                f"{name}:{number}: the line has more than {longest >> 20} MB, the most that a "
                "prompt may have"
            )
        line = raw.removeprefix(BOM) if number == 1 else raw
        try:
            yield number, line.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
            raise UserError(f"{name}:{number}: the text is not valid UTF-8: {bad}") from None


def read_txt(stream: IO[bytes], name: str) -> Records:
    """Yield the lines that are not blank, without their line ends."""
    return (
        (number, line.rstrip("\r\n")) for number, line in _text_lines(stream, name) if line.strip()
    )


class _RefusedError(ValueError):
    """JSON that Python's reader accepts and this one refuses."""


def _no_constant(word: str) -> NoReturn:
    raise _RefusedError(f"{word} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; refuse a key that is given twice, because one of its values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = (Counter(key for key, _ in pairs)).most_common(1)
        raise _RefusedError(f'the key "{shown(key)[1:-1]}" is given twice in one object')
    return found


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_without_duplicates)


def _broken(name: str, line: int, error: Exception) -> UserError:
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg} at column {error.colno}"
    elif isinstance(error, RecursionError):
        reason = "it is nested too deep"
    elif isinstance(error, _RefusedError):
        reason = str(error)
    else:  # Python limits the digits of an integer
        reason = "a number has too many digits"
    return UserError(f"{name}:{line}: broken JSON: {reason}")


def read_jsonl(stream: IO[bytes], name: str) -> Records:
    """Yield one JSON value a line; skip blank lines."""
    for number, line in read_txt(stream, name):
        try:
            yield number, _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            raise _broken(name, number, error) from None


def read_json(stream: IO[bytes], name: str) -> Records:
    """Yield the items of one JSON list, each with the line on which it starts."""
    content = stream.read(_LONGEST_LIST + 1)
    if len(content) > _LONGEST_LIST:
        raise UserError(
            f"{name}:1: a .json file may have at most {_LONGEST_LIST >> 20} MB, because it is read "
            "as a whole; convert it to .jsonl"
        )
    text = "".join(
        line for _, line in _text_lines(io.BytesIO(content), name, longest=_LONGEST_LIST)
    )
    position, line = _skip_blank(text, 0, 1)
    if text[position : position + 1] != "[":
        raise UserError(f"{name}:{line}: a .json file of prompts is one list: [{{...}}, ...]")
    position, line = _skip_blank(text, position + 1, line)
    while text[position : position + 1] != "]":
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            here = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _broken(name, here, error) from None
        yield line, value
        position, line = _skip_blank(text, end, line + text.count("\n", position, end))
        if text[position : position + 1] == ",":
            position, line = _skip_blank(text, position + 1, line)
            if text[position : position + 1] == "]":
                raise UserError(f'{name}:{line}: broken JSON: "," before the closing "]"')
        elif text[position : position + 1] != "]":
            raise UserError(
                f'{name}:{line}: broken JSON: a "," or the closing "]" of the list is missing'
            )
    position, line = _skip_blank(text, position + 1, line)
    if position < len(text):
        raise UserError(f"{name}:{line}: broken JSON: something follows the end of the list")


def _skip_blank(text: str, position: int, line: int) -> tuple[int, int]:
    start = position
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position, line + text.count("\n", start, position)


def read_parquet(stream: IO[bytes], name: str) -> Records:
    """Yield the rows of a parquet file, numbered from 1; a small batch is in memory at a time."""
    import pyarrow

    rows = _parquet_rows(stream)
    for number in itertools.count(1):
        try:
            row = next(rows, None)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            what = str(error).splitlines()[0]
            raise UserError(f"{name}:{number}: broken parquet: {what}") from None
        if row is None:
            return
        yield number, row


def _parquet_rows(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(stream)
    for column, count in Counter(file.schema_arrow.names).items():
        if count > 1:
            raise ValueError(f'{count} columns are called "{column}"')
    for batch in file.iter_batches(batch_size=256):
        yield from map(_plain, batch.to_pylist())


def hub_records(source: str) -> Records:
    """Stream the rows of the dataset hf:NAME[:CONFIG][:SPLIT], numbered from 1."""
    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(f"{source}: write a dataset as hf:NAME[:CONFIG][:SPLIT]")
    if len(parts) == 2 and (parts[1] in SPLITS or "[" in parts[1]):
        parts.insert(1, "")
    name, config, split = (part or None for part in [*parts, "", ""][:3])
    for number, row in enumerate(_stream_dataset(source, str(name), config, split), 1):
        yield number, _plain(dict(row))


def _stream_dataset(source: str, name: str, config: str | None, split: str | None) -> Any:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    _reach_hub(source, name)
    try:
        # Versions before 4 would run a dataset's own script after a question on standard input;
        # later versions raise a RuntimeError that names the script.
        found = datasets.load_dataset(
            name, config, split=split, streaming=True, trust_remote_code=False
        )
    except (
        datasets.exceptions.DatasetsError,
        ValueError,
        FileNotFoundError,
        RuntimeError,
    ) as error:
        raise UserError(f"{source}: cannot open the dataset: {_first_line(error)}") from None
    except (OSError, ImportError) as error:
        raise refusal(source, error, remedy=_remedy(name)) from None
    if split is not None:
        return found
    if len(found) > 1:
        raise UserError(
            f"{source}: choose a split, as in {source}:{next(iter(found))}; {nearest('', found)}"
        )
    return next(iter(found.values()))


def _reach_hub(source: str, name: str) -> None:
    """Raise MachineError if the hub cannot be reached.

    Without this check the hub's client retries for half a minute and reports each attempt.
    """
    import huggingface_hub

    if Path(name).exists():
        return
    try:
        huggingface_hub.dataset_info(name, timeout=_PATIENCE)
    except (
        huggingface_hub.errors.HfHubHTTPError,
        huggingface_hub.errors.OfflineModeIsEnabled,
        ValueError,
    ):
        pass  # the hub answers, or a cache must do; loading reports what is wrong
    except Exception as error:  # its type depends on the HTTP client of the hub's package
        raise refusal(source, ConnectionError(str(error)), remedy=_remedy(name)) from None


def _remedy(name: str) -> str:
    return (
        f"on a machine with a network: hf download --repo-type dataset {name} --local-dir FOLDER; "
        "then name a .parquet, .jsonl or .json file of that folder in place of hf:... (with --data "
        "in bass eval and bass score)"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with values that JSON cannot hold (dates, bytes) as text."""
    return json.loads(json.dumps(row, default=str))


READERS: dict[str, Callable[[IO[bytes], str], Records]] = {
    "jsonl": read_jsonl,
    "json": read_json,
    "txt": read_txt,
    "parquet": read_parquet,
}
