"""Where the seconds of a run went, and how busy its rows were. It is told of phases, rounds and
samples as they come (io/console.py).

Not told, because nobody knows without making the device wait: what prompts that are read between
rounds take. On a CPU they count as between rounds; a GPU reads them while rounds wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_LAST = 0.05  # the share of samples in which rows empty, whatever anybody does


class Usage:
    """`capacity`: rows of the batch; `total`: samples to come, None where nobody knows. Each second
    from now on counts in one phase."""

    def __init__(self, capacity: int, total: int | None, *, now: Callable[[], float]):
        self._capacity, self._now = capacity, now
        self._early = None if total is None else total * (1 - _LAST)
        self._phases: dict[str, float] = {}
        self._phase, self._since = "starting", now()
        self._begun = False  # whether there was a round
        self._rounds = self._live = self._most = 0  # live rows of all rounds; of the fullest
        self._places = 0  # for rows, of all rounds
        self._full = self._draining = self._capturing = 0.0
        self._samples, self._busy_early = 0, (0, 0)

    def phase(self, name: str) -> None:
        """What is done from now on, until something else or a round is."""
        self._end_phase(self._now())
        self._phase = name

    def round(
        self, rows: int, seconds: float, capturing: float = 0.0, capacity: int | None = None
    ) -> None:
        """A round of so many live rows is over; capturing graphs for it took so long besides.
        `capacity`: the batch's rows from now on, which become fewer where memory runs out."""
        if capacity is not None and capacity != self._capacity:
            self._capacity, self._most = capacity, 0
        if not self._begun:
            self._end_phase(self._now() - seconds - capturing)
            self._begun, self._phase = True, "between rounds"
        self._rounds += 1
        self._live += rows
        self._places += self._capacity
        self._capturing += capturing
        self._draining += seconds
        if rows >= self._most:  # until now no row was left empty for good
            self._most = rows
            self._full, self._draining = self._full + self._draining, 0.0

    def sample(self) -> None:
        """One sample is done."""
        self._samples += 1
        if self._early is not None and self._samples <= self._early:
            self._busy_early = (self._live, self._places)

    def summary(self) -> dict[str, Any]:
        """`rows`: the batch's in the end; `rows_busy`: live rows over the batch's, in the mean of
        all rounds; `rows_busy_early`: of those before the last 5 % of samples, None where there
        are none; `phases`: seconds."""
        phases = dict(self._phases)
        phases[self._phase] = phases.get(self._phase, 0.0) + self._now() - self._since
        if self._begun:
            rounds = {
                "decoding": self._full,
                "draining": self._draining,
                "capturing graphs": self._capturing,
            }
            rest = phases.pop("between rounds") - sum(rounds.values())
            phases |= {**rounds, "between rounds": max(rest, 0.0)}
        return {
            "rows": self._capacity,
            "rounds": self._rounds,
            "rows_busy": self._share(self._live, self._places),
            "rows_busy_early": self._share(*self._busy_early),
            "phases": {name: round(seconds, 3) for name, seconds in phases.items()},
        }

    @staticmethod
    def _share(live: int, places: int) -> float | None:
        return round(live / places, 4) if places else None

    def _end_phase(self, when: float) -> None:
        spent = max(when - self._since, 0.0)
        self._phases[self._phase] = self._phases.get(self._phase, 0.0) + spent
        self._since += spent


def together(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One summary of those of several processes: `actors` of them; rows and seconds of all."""
    phases: dict[str, float] = {}
    for usage in usages:
        for name, seconds in usage["phases"].items():
            phases[name] = round(phases.get(name, 0.0) + seconds, 3)
    places = sum(one["rounds"] * one["rows"] for one in usages)
    live = sum(one["rounds"] * one["rows"] * (one["rows_busy"] or 0.0) for one in usages)
    return {
        "rows": sum(one["rows"] for one in usages),
        "rounds": sum(one["rounds"] for one in usages),
        "rows_busy": round(live / places, 4) if places else None,
        "rows_busy_early": None,
        "phases": phases,
        "actors": len(usages),
    }


def describe(usage: dict[str, Any]) -> str:
    """Return a summary with rounds as a line of text. It has no seconds if every phase is shorter
    than 0.05 s."""
    early = usage["rows_busy_early"]
    until = "" if early is None else f" ({early:.0%} until the last 5% of samples)"
    phases = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in usage["phases"].items() if seconds >= 0.05
    )
    whose = f" of {usage['actors']} actors together" if "actors" in usage else ""
    spent = f"; seconds{whose}: {phases}" if phases else ""
    return f"rows busy: {usage['rows_busy']:.0%} of {usage['rows']}{until}{spent}"
