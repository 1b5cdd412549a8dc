"""Scores of a command that is not finished, in a file, so that an interrupted one goes on.

Only rankers that run a model use it. The file is removed when the scores are in the lines.
"""

from __future__ import annotations

import hashlib
import json
import os
from types import TracebackType

from bass_cli.errors import MachineError
from bass_cli.io.saving import check_place, open_locked, refuse_foreign
from bass_cli.rank.ranking import Group, Ranker, Scores
from bass_cli.reading import finite, os_errors_as, parse_object, text

_BEGINNING = b'{"ranker": '  # every line starts like this


class ScoreStore:
    """The file, open and locked.

    Args:
        path: The file. Lines that cannot be read are scored again.

    Raises:
        UserError: The file cannot be opened, is another one, or another process uses it.
    """

    def __init__(self, path: str):
        self.path = path
        self._known: dict[str, Scores] = {}
        check_place(path, path)
        refuse_foreign(
            path,
            path,
            lambda content: content.startswith(_BEGINNING) or _BEGINNING.startswith(content),
            kind="a file of scores",
            remedy="move it away",
        )
        self._stream = open_locked(path, "the scores", "another process is ranking this file")
        self._stream.seek(0)
        end = 0
        for line in self._stream:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            self._read(line)
        self._stream.truncate(end)

    def _read(self, line: bytes) -> None:
        try:
            row = parse_object(line)
            found = [None if one is None else finite(one) for one in row["scores"]]
            self._known[text(row["sha256"])] = found
        except (ValueError, KeyError, TypeError):
            return

    def __enter__(self) -> ScoreStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Close the file; remove it if there was no error."""
        if kind is None:
            os.unlink(self.path)
        self._stream.close()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, digest: str) -> Scores | None:
        """Return known scores."""
        return self._known.get(digest)

    def add(self, name: str, digest: str, scores: Scores) -> None:
        """Append the scores of a group. MachineError if they cannot be written."""
        row = {"ranker": name, "sha256": digest, "scores": list(scores)}
        remedy = "the earlier ones are kept; run the same command again to continue"
        with os_errors_as(MachineError, f"{self.path}: cannot write the scores", remedy):
            self._stream.write(json.dumps(row).encode("ascii") + b"\n")
            self._stream.flush()
        self._known[digest] = scores


def digest_of(ranker: Ranker, group: Group) -> str:
    """Return the SHA-256 of everything that a ranker's scores of a group depend on."""
    samples = [[one.text, one.program] for one in group.candidates]
    told = [ranker.name, ranker.identity, group.id, group.prompt, group.entry_point, samples]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
