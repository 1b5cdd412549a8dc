"""Define Sampling, the part of a job that says how tokens are drawn. See job.py."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationInfo, field_validator, model_validator

from bass_cli.config.file_options import FIELDS, Structure, read_structure, structure_of
from bass_cli.config.options import SamplingOptions
from bass_cli.config.validation import Strict
from bass_cli.reading import is_unicode, shown

_LARGEST_BIAS = 1000  # the largest number added to a logit


class Sampling(Strict, SamplingOptions, frozen=True):
    """How tokens are sampled. Temperature 0 is greedy; top_k 0 means no limit. The order is that of
    transformers: logit_bias, penalties, bad_words and allowed_token_ids; temperature, top_k, top_p,
    min_p.

    `logit_bias`: numbers by token id. `bad_words`: a text or texts that no sample contains, by
    their usual tokens. `allowed_token_ids`: the only ids that are drawn; None for all.

    `stop`: a text or texts that end a sample. `stop_token_ids`: an id or ids that end it, with the
    finish reason "stop". `include_stop`: whether the text of a sample has the stop that ended it.
    `json_schema` and `grammar` become texts: a mapping or a file is read when the object is made.
    At most one of them, `json_object` and `regex` is set.
    """

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _texts(cls, value: Any, info: Any) -> Any:
        listed = (value,) if isinstance(value, str) else value
        if not isinstance(listed, (list, tuple)):
            raise ValueError(f"a text or a list of texts is needed, not {shown(value)}")
        for text in listed:
            if text == "":
                raise ValueError(
                    "an empty stop string would stop every sample at once"
                    if info.field_name == "stop"
                    else "an empty text is in every sample"
                )
            if isinstance(text, str) and not is_unicode(text):
                raise ValueError(
                    f"{shown(text)} holds half of a surrogate pair, which no sample's text has"
                )
        return tuple(listed)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias(cls, value: Any) -> Any:
        """Accept a mapping, whose keys may be texts as in JSON, or texts such as "5=-1.5"."""
        listed = [value] if isinstance(value, str) else value
        if isinstance(listed, (list, tuple)) and all(isinstance(one, str) for one in listed):
            listed = dict(one.partition("=")[::2] for one in listed)
        if listed is None:
            return None
        if not isinstance(listed, Mapping):
            raise ValueError(f"a mapping from token ids to numbers is needed, not {shown(value)}")
        found = dict[int, float]()
        for key, number in listed.items():
            id_ = str(key).strip()
            if isinstance(key, bool) or not re.fullmatch(r"\d{1,9}", id_, re.ASCII):
                raise ValueError(f"{shown(key)} is not a token id")
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                if not isinstance(number, bool) and abs(float(number)) <= _LARGEST_BIAS:
                    found[int(id_)] = float(number)
                    continue
            raise ValueError(
                f"token {id_} needs a number from -{_LARGEST_BIAS} to {_LARGEST_BIAS}, not "
                f"{shown(number)}"
            )
        return dict(sorted(found.items())) or None

    @field_validator("stop_token_ids", "allowed_token_ids", mode="before")
    @classmethod
    def _ids(cls, value: Any, info: Any) -> Any:
        """Accept one id, a list of ids, or a text such as "1,2" of the command line."""
        if value is None and info.field_name == "allowed_token_ids":
            return None
        if isinstance(value, str) and re.fullmatch(
            r"\s*(\d{1,9}\s*(,\s*\d{1,9}\s*)*)?", value, re.ASCII
        ):
            value = [int(one) for one in value.split(",") if one.strip()]
        listed = [value] if type(value) is int else value
        if not isinstance(listed, (list, tuple)) or not all(type(one) is int for one in listed):
            raise ValueError(f"token ids are needed, such as 1 or 1,2, not {shown(value)}")
        if any(one < 0 for one in listed):
            raise ValueError("a token id is 0 or more")
        if not listed and info.field_name == "allowed_token_ids":
            raise ValueError("it is empty, so no token could be drawn")
        return tuple(listed)

    @field_validator(*FIELDS, mode="before")
    @classmethod
    def _structure(cls, value: Any, info: ValidationInfo) -> Any:
        return read_structure(str(info.field_name), value, **(info.context or {}))

    @model_validator(mode="after")
    def _one_structure(self) -> Sampling:
        given = [f"`sampling.{name}`" for name in FIELDS if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other")
        return self

    @property
    def structure(self) -> Structure | None:
        """What the text of a sample must match; None if it is free."""
        return structure_of(self)

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before the temperature."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        more = self.logit_bias or self.bad_words or self.allowed_token_ids or self.structure
        limited = self.max_thinking_tokens is not None
        return penalties != (1.0, 0.0, 0.0) or limited or bool(more)
