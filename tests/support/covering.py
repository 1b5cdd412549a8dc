"""Few cases that together contain every combination of a few settings (covering arrays)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def covering(axes: Mapping[str, Sequence[Any]], strength: int = 2) -> list[tuple[Any, ...]]:
    """Return cases, one value of each axis in their order, so that any values of any `strength` axes
    are together in some case. Each call returns the same cases.

    A case begins with the first combination that no case has. Then each other axis takes the value
    that adds the most combinations.
    """
    places = range(len(axes))
    values = list(axes.values())
    missing = {
        tuple(zip(chosen, found, strict=True)): None  # a dict keeps their order
        for chosen in itertools.combinations(places, strength)
        for found in itertools.product(*(range(len(values[place])) for place in chosen))
    }
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for place in places:
            if place not in case:
                case[place] = max(
                    range(len(values[place])),
                    key=lambda value: len(_new(case | {place: value}, missing, strength, place)),
                )
        for combination in itertools.combinations(sorted(case.items()), strength):
            missing.pop(combination, None)
        cases.append(tuple(values[place][case[place]] for place in places))
    return cases


def _new(case, missing, strength, place):
    """Return the missing combinations of a case, or of a part of one, that contain this place."""
    return [
        combination
        for combination in itertools.combinations(sorted(case.items()), strength)
        if any(at == place for at, _ in combination) and combination in missing
    ]
