"""The settings that a prompt has of its own: options of a Job that hold for its samples alone.

config/options.py declares which options these are (`LINE`), and a Job checks their values. So a
line of a prompt file and a Job accept the same values. io/prompts.py takes the settings from the
other fields of a line.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from bass_cli.config.file_options import merged
from bass_cli.config.job import Job, Pair
from bass_cli.config.options import LINE
from bass_cli.config.sampling import Sampling
from bass_cli.config.validation import first_fault

_ANY_PAIR = Pair(name="any", target="any")


class SettingError(ValueError):
    """A setting has an invalid value. `field` is its name."""

    def __init__(self, field: str, reason: str):
        super().__init__(reason)
        self.field = field


def checked_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, by the names in LINE, as a Job would hold them.

    Raises:
        SettingError: A value is not valid, whatever the job.
    """
    own, sampling = _split(given)
    with _named(given):
        checked: dict[str, Any] = {"sampling": _sampling(sampling)} if sampling else {}
        if own:
            job = Job.model_validate({"pair": _ANY_PAIR, **own})
            checked |= {name: getattr(job, name) for name in own}
    return {name: _value(checked, LINE[name]) for name in given}


def own_job(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return the job of a prompt that has these settings of its own.

    `settings`: as `checked_settings` returns them.

    Raises:
        SettingError: The settings contradict those of the job.
    """
    own, given = _split(settings)
    if given:
        with _named(settings):
            own["sampling"] = _sampling(merged(dict(job.sampling), given))
    return job.model_copy(update=own) if own else job


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that are fields of a Job, and those of its Sampling."""
    own, sampling = dict[str, Any](), dict[str, Any]()
    for name, value in settings.items():
        part, _, key = LINE[name].rpartition(".")
        (sampling if part else own)[key] = value
    return own, sampling


def _sampling(given: Mapping[str, Any]) -> Sampling:
    # a line of data names no files
    return Sampling.model_validate(given, context={"files": False})


@contextlib.contextmanager
def _named(settings: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of pydantic into a SettingError."""
    try:
        yield
    except ValidationError as error:
        path, reason = first_fault(error)
        reason = re.sub(r"`sampling\.(\w+)`", r'"\1"', reason)  # a line has fields, not options
        raise SettingError(path[-1] if path else next(iter(settings)), reason) from None


def _value(checked: Mapping[str, Any], path: str) -> Any:
    part, _, key = path.rpartition(".")
    value = getattr(checked[part], key) if part else checked[key]
    return list(value) if isinstance(value, tuple) else value
