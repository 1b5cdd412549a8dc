"""Define Completion, a finished sample, and its line of JSON. io/results.py writes the lines."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one prompt. The fields are those of a result line, in order.

    Logarithms are natural; times are in seconds.

    `token_ids` are all tokens that were drawn, in order. The token that ended the sample is among
    them: the end-of-sequence token, a special token that is a stop, or the last token of a stop
    text. `tokens` is their number; `sum_logprob` and `mean_logprob` cover all of them. `text` is
    their text before that end, without special tokens. It has neither a stop text nor what follows
    the stop text in its last token. A stop text may begin inside a token, so in general no list of
    ids decodes to `text`.

    `copy_of` is the number of the sample that this one is a copy of. `task_id` and `completion` are
    set by evaluations, for public scorers.
    """

    id: str
    sample: int
    text: str
    finish_reason: str
    tokens: int
    mean_logprob: float | None
    sum_logprob: float | None
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    seed: int
    prompt_tokens: int
    meta: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] | None = None
    error: str | None = None
    copy_of: int | None = None
    task_id: str | None = None
    completion: str | None = None

    @classmethod
    def failed(cls, prompt_id: str, error: str, *, seed: int, meta: dict[str, Any]) -> Completion:
        """Make the single line of a prompt that could not be run."""
        return cls(
            prompt_id, 0, "", "error", 0, None, None, 0.0, 0, 0, 0, seed, 0, meta, None, error
        )

    @property
    def is_of_prompt(self) -> bool:
        """Whether this is the single line of a prompt that could not be run, not a sample."""
        return self.finish_reason == "error" and not self.prompt_tokens

    def copied(self, sample: int) -> Completion:
        """Copy it to another sample number; the copy has no rounds and no drafts."""
        return replace(self, sample=sample, rounds=0, drafted=0, accepted=0, copy_of=self.sample)

    def to_line(self) -> str:
        """Format one line of strict JSON, without a line end.

        Fields of _OPTIONAL that are None are left out. NaN and infinity become null, and lone
        surrogates are escaped.
        """
        row = {name: getattr(self, name) for name in _NAMES}
        for name in _OPTIONAL:
            if row[name] is None:
                del row[name]
        try:
            line = _encode(row)
        except ValueError:
            row = _finite(row)
            line = _encode(row)
        try:
            line.encode("utf-8")
        except UnicodeEncodeError:
            return json.dumps(row, allow_nan=False, default=str)
        return line


_NAMES = tuple(entry.name for entry in fields(Completion))
_OPTIONAL = ("token_ids", "error", "copy_of", "task_id", "completion")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode


def _finite(value: Any) -> Any:
    """Replace every NaN and infinity in the value, which JSON cannot hold, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
