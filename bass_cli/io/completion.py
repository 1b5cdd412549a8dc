"""A finished sample, and the line of JSON that it becomes. Not here: the file that lines go to
(io/results.py)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one prompt; the fields are a result line's, in order. Logs are natural,
    times in seconds.

    `token_ids` are all tokens that were drawn, in order, with what ended the sample: the
    end-of-sequence token, a special token that is a stop, or the tokens of a stop text. `tokens`
    is their number, `sum_logprob` and `mean_logprob` are of all of them. `text` is what they read
    as before that end: special tokens are left out, and so is a stop text with whatever follows
    it in its last token. A stop text may begin inside a token, so no list of ids reads as `text`
    in general.

    `copy_of`: the sample whose copy it is. `task_id` and `completion` are an evaluation's: what
    public scorers read.
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
        """The one line of a prompt that could not be run."""
        return cls(
            prompt_id, 0, "", "error", 0, None, None, 0.0, 0, 0, 0, seed, 0, meta, None, error
        )

    @property
    def is_of_prompt(self) -> bool:
        """Whether it is the one line of a prompt that could not be run, not a sample."""
        return self.finish_reason == "error" and not self.prompt_tokens

    def copied(self, sample: int) -> Completion:
        """The same for another sample number: equal in all but the work, which was done once."""
        return replace(self, sample=sample, rounds=0, drafted=0, accepted=0, copy_of=self.sample)

    def to_line(self) -> str:
        """One line of strict JSON without its end; the fields of _OPTIONAL only where there is
        something. What JSON or UTF-8 has no form for is rare, and only looked for when found."""
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
    """The value with None for every NaN and infinity in it, which JSON has no words for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
