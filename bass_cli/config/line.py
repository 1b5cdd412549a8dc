"""The settings that a prompt has of its own: options of a Job that hold for its samples alone.

config/options.py declares which options these are (`LINE`), and a Job checks their values. So a
line of a prompt file and a Job accept the same values. io/prompts.py takes the settings from the
other fields of a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from bass_cli.config.faults import first_fault
from bass_cli.config.job import Job, Pair, Sampling
from bass_cli.config.options import LINE
from bass_cli.config.structure import merged

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
    own = _with(Job(pair=_ANY_PAIR), given)
    return {name: _value(own, LINE[name]) for name in given}


def own_job(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return the job of a prompt that has these settings of its own.

    Raises:
        SettingError: The settings contradict those of the job.
    """
    return _with(job, settings) if settings else job


def _with(job: Job, settings: Mapping[str, Any]) -> Job:
    own, given = dict[str, Any](job), dict[str, Any]()
    for name, value in settings.items():
        part, _, key = LINE[name].rpartition(".")
        (given if part else own)[key] = value
    sampling = merged(dict(job.sampling), given)
    try:
        # a line of data names no files
        own["sampling"] = Sampling.model_validate(sampling, context={"files": False})
        return Job.model_validate(own)
    except ValidationError as error:
        path, reason = first_fault(error)
        raise SettingError(path[-1] if path else next(iter(settings)), reason) from None


def _value(job: Job, path: str) -> Any:
    part, _, key = path.rpartition(".")
    value = getattr(getattr(job, part) if part else job, key)
    return list(value) if isinstance(value, tuple) else value
