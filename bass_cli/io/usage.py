"""Count where the seconds of a run go, how busy its rows are, and what drafts gained.

io/console.py shows the counts; processes of other machines send theirs (`together`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

_LAST = 0.05  # the share of samples in which rows empty at the end of any job
# The share of the drafted rounds' seconds without a known cost of plain rounds, beyond which there
# is no estimate
_UNKNOWN = 0.05


class Usage:
    """Counts of one run, from now on.

    Args:
        capacity: The rows of the batch.
        total: The number of samples to come; None if unknown.
    """

    def __init__(self, capacity: int, total: int | None):
        self._capacity = capacity
        self._early = None if total is None else total * (1 - _LAST)
        self._phases: dict[str, float] = defaultdict(float)
        self._phase, self._since = "starting", time.monotonic()
        self._begun = False  # whether there was a round
        self._rounds = self._live = self._most = 0  # live rows: of all rounds, of the fullest
        self._places = 0  # the sum of capacities over all rounds
        self._full = self._draining = self._capturing = 0.0
        self._samples, self._busy_early = 0, (0, 0)
        # of all rows and rounds with drafts: how many were drafted, how many of them accepted
        self._drafted, self._accepted = Counter[int](), Counter[int]()

    def phase(self, name: str) -> None:
        """Begin a phase; it ends with the next phase or the first round."""
        self._end_phase(time.monotonic())
        self._phase = name

    def round(
        self,
        rows: int,
        seconds: float,
        capturing: float = 0.0,
        capacity: int | None = None,
        *,
        refills: bool = False,
    ) -> None:
        """Count a finished round.

        Args:
            rows: Its live rows.
            seconds: Its time, without `capturing`.
            capturing: Seconds of capturing graphs for it.
            capacity: The rows of the batch from now on; fewer after memory ran out.
            refills: Whether samples wait for a row. Rows that have just ended are empty for a
                round, so fewer live rows alone do not mean that the batch drains.
        """
        if capacity is not None and capacity != self._capacity:
            self._capacity, self._most = capacity, 0
        if not self._begun:
            self._end_phase(time.monotonic() - seconds - capturing)
            self._begun, self._phase = True, "between rounds"
        self._rounds += 1
        self._live += rows
        self._places += self._capacity
        self._capturing += capturing
        self._draining += seconds
        if refills or rows >= self._most:  # the batch was not draining until now
            self._most = max(self._most, rows)
            self._full, self._draining = self._full + self._draining, 0.0

    def drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count the drafts of a round by their place: how many each row had, and kept."""
        self._drafted.update(map(max, drafted, accepted))
        self._accepted.update(accepted)

    def sample(self) -> None:
        """Count a finished sample."""
        self._samples += 1
        if self._early is not None and self._samples <= self._early:
            self._busy_early = (self._live, self._places)

    def summary(self) -> dict[str, Any]:
        """Return the counts.

        `rows`: the rows of the batch at the end. `rows_busy`: the mean share of live rows over all
        rounds. `rows_busy_early`: the same before the last 5 % of samples; None if there were no
        such rounds. `phases`: seconds by phase. `by_place`, if there were drafts: how many tokens
        were drafted and accepted at the first place of a draft, at the second, and so on.
        """
        phases = dict(self._phases)
        phases[self._phase] = self._phases[self._phase] + time.monotonic() - self._since
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
            **self._by_place(),
        }

    def _by_place(self) -> dict[str, Any]:
        most = max(self._drafted, default=0)
        counts = {"drafted": self._drafted, "accepted": self._accepted}
        by_place = {
            name: [
                sum(rows for length, rows in found.items() if length >= place)
                for place in range(1, most + 1)
            ]
            for name, found in counts.items()
        }
        return {"by_place": by_place} if most else {}

    @staticmethod
    def _share(live: int, places: int) -> float | None:
        return round(live / places, 4) if places else None

    def _end_phase(self, when: float) -> None:
        spent = max(when - self._since, 0.0)
        self._phases[self._phase] += spent
        self._since += spent


def together(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the summaries of several processes; rows and seconds are summed."""
    phases: dict[str, float] = {}
    for usage in usages:
        for name, seconds in usage["phases"].items():
            phases[name] = round(phases.get(name, 0.0) + seconds, 3)
    places = sum(one["rounds"] * one["rows"] for one in usages)
    live = sum(one["rounds"] * one["rows"] * (one["rows_busy"] or 0.0) for one in usages)
    drafted = [one["by_place"] for one in usages if "by_place" in one]
    by_place = {
        name: [sum(column) for column in zip_longest(*(one[name] for one in drafted), fillvalue=0)]
        for name in ("drafted", "accepted")
    }
    return {
        "rows": sum(one["rows"] for one in usages),
        "rounds": sum(one["rounds"] for one in usages),
        "rows_busy": round(live / places, 4) if places else None,
        "rows_busy_early": None,
        "phases": phases,
        "actors": len(usages),
        **({"by_place": by_place} if drafted else {}),
    }


def describe(usage: dict[str, Any]) -> list[str]:
    """Return a summary with rounds as lines of text. There are no seconds if every phase is shorter
    than 0.05 s."""
    early = usage["rows_busy_early"]
    until = "" if early is None else f" ({early:.0%} until the last 5% of samples)"
    phases = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in usage["phases"].items() if seconds >= 0.05
    )
    whose = f" of {usage['actors']} actors together" if "actors" in usage else ""
    spent = [f"seconds{whose}: {phases}"] if phases else []
    return [f"rows busy: {usage['rows_busy']:.0%} of {usage['rows']}{until}", *spent]


class Gain:
    """Estimate the seconds that drafts saved, from the measured cost of plain rounds.

    A drafted round in which a row gained t tokens on average replaces t plain rounds. The estimate
    leaves out what drafts cost outside of rounds, such as loading their model.
    """

    def __init__(self) -> None:
        self._drafted = self._unknown = self._plain = 0.0

    def round(self, drafted: int, rows: int, accepted: int, seconds: float, plain: float) -> None:
        """Count a finished round.

        Args:
            drafted: The drafts of all rows.
            rows: Its live rows.
            accepted: The accepted drafts of all rows.
            seconds: Its time.
            plain: Seconds of a plain round of these rows; 0 if unknown.
        """
        if not drafted or not rows:
            return
        if plain <= 0:
            self._unknown += seconds
            return
        self._drafted += seconds
        self._plain += plain * (1 + accepted / rows)

    @property
    def seconds(self) -> float | None:
        """The seconds saved, below 0 if drafts cost more; None if that is unknown."""
        known = self._drafted > 0 and self._unknown <= _UNKNOWN * (self._drafted + self._unknown)
        return self._plain - self._drafted if known else None
