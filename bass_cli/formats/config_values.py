"""Checked access to the values of a model's configuration or metadata.

hf_config.py, gguf_config.py and head_config.py say what the values mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bass_cli.errors import UserError, nearest
from bass_cli.reading import finite, shown, truth, whole

# Upper limits, larger than in any model. A corrupt config must not take much memory before its
# tensors are checked against it.
_MOST = {"layers": 1 << 12, "head_size": 1 << 16, "experts": 1 << 12}
_LARGEST = 2**31 - 1  # of all other sizes
_Value = TypeVar("_Value")


class Values:
    """Checked access to the values of a config or of metadata.

    Args:
        keys: the file's key for each word that callers use.
        place: the file's name, for errors. A UserError names it and the file's own key.
    """

    def __init__(self, values: Mapping[str, Any], keys: Mapping[str, str], place: str):
        self.values, self._keys, self.place = values, keys, place

    def key(self, word: str) -> str:
        return self._keys.get(word, word)

    def number(self, word: str, default: float | None = None) -> float:
        """Return a finite number above 0. A value of None means the default."""
        return self._checked(word, default, _above_0)

    def count(self, word: str, default: int | None = None) -> int:
        """Return a whole number above 0, at most the limit for this word."""
        return self._checked(
            word, default, lambda value: _whole(_above_0(value), _MOST.get(word, _LARGEST))
        )

    def flag(self, word: str) -> bool:
        """Return a boolean; False if it is missing."""
        return self._checked(word, False, truth)

    def mapping(self, word: str) -> dict[str, Any]:
        """Return an object; an empty one if it is missing."""
        value = self.values.get(word) or {}
        if not isinstance(value, Mapping):
            raise UserError(f'{self.place}: key "{word}": a mapping is needed, not {shown(value)}')
        return dict(value)

    def _checked(self, word: str, default: Any, check: Callable[[Any], _Value]) -> _Value:
        value = self.values.get(self.key(word))
        value = default if value is None else value
        if value is None:
            raise UserError(f'{self.place}: the key "{self.key(word)}" is missing')
        try:
            return check(value)
        except ValueError as error:
            raise UserError(f'{self.place}: key "{self.key(word)}": {error}') from None


def _above_0(value: Any) -> float:
    if isinstance(value, (int, float)) and value > 0:
        return finite(value)
    raise ValueError(f"a number above 0 is needed, not {shown(value)}")


def _whole(value: float, most: int) -> int:
    """Convert to an integer. 8.0 is accepted for 8."""
    return whole(int(value) if value.is_integer() else value, least=1, most=most)


def known(word: Any, choices: Mapping[str, Any] | tuple[str, ...], place: str, what: str) -> None:
    """Raise a UserError that lists the choices unless the word is one of them."""
    if not isinstance(word, str) or word not in choices:
        given = word if isinstance(word, str) else shown(word)
        close = nearest(given, choices)
        listed = "" if close.startswith("known") else f"; known: {', '.join(choices)}"
        raise UserError(f'{place}: {what} "{given[:80]}" is not supported; {close}{listed}')
