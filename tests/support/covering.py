"""Few cases that together contain every combination of a few settings (covering arrays)."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def covering(axes: Mapping[str, Sequence[Any]], strength: int = 2) -> list[tuple[Any, ...]]:
    """Return cases, one value of each axis in their order, so that any values of any `strength` axes
    are together in some case. Each call returns the same cases.

    A case begins with the first combination that no case has. Then each other axis takes the value
    that adds the most combinations; of several, the one that cases have had least often.
    """
    places = range(len(axes))
    values = list(axes.values())
    missing = {
        tuple(zip(chosen, found, strict=True)): None  # a dict keeps their order
        for chosen in itertools.combinations(places, strength)
        for found in itertools.product(*(range(len(values[place])) for place in chosen))
    }
    cases, uses = [], Counter()
    while missing:
        case = dict(next(iter(missing)))
        for place in places:
            if place not in case:
                gains = {
                    value: (
                        _gain(case | {place: value}, missing, strength, place),
                        -uses[place, value],
                    )
                    for value in range(len(values[place]))
                }
                case[place] = max(gains, key=gains.__getitem__)
        for combination in itertools.combinations(sorted(case.items()), strength):
            missing.pop(combination, None)
        uses.update(case.items())
        cases.append(tuple(values[place][case[place]] for place in places))
    return cases


def _gain(case, missing, strength, place):
    """Return how many missing combinations a case, or a part of one, has with this place."""
    return sum(
        combination in missing and any(at == place for at, _ in combination)
        for combination in itertools.combinations(sorted(case.items()), strength)
    )
