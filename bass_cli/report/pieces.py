"""Split the text of a sample into its tokens, to show the log-probability of each.

Result lines have the ids of tokens, not their texts, so the tokenizer must be on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bass_cli.errors import UserError
from bass_cli.eval.samples import part_of

if TYPE_CHECKING:
    from bass_cli.formats.tokenizer import Tokenizer

_BEFORE = 4  # tokens decoded before one whose text depends on them: a character has 4 bytes


class Pieces:
    """Finds where the tokens of a text begin.

    Attributes:
        notes: why tokens have no texts, if the tokenizer is not here.

    Args:
        manifest: of the file of samples; it names the target.
        model: the target here, if it is at another place than the manifest says.
    """

    def __init__(self, manifest: Mapping[str, Any], model: str | None = None) -> None:
        self.notes: list[str] = []
        self._tokenizer: Tokenizer | None = None
        self._texts: dict[int, str] = {}
        self._manifest, self._model, self._tried = manifest, model, False

    def of(self, ids: Any, text: str) -> dict[str, Any]:
        """Return {"pieces": the length of each token's text, in UTF-16 units}.

        Empty if it is unknown: the tokens do not spell the text, or there is no tokenizer. Tokens
        after the text, such as the end of the sample, have lengths too.
        """
        tokenizer = self._load()
        if tokenizer is None or not isinstance(ids, list) or not ids:
            return {}
        try:
            pieces = [self._alone(tokenizer, id_) for id_ in ids]
            if not "".join(pieces).startswith(text):
                pieces = _in_context(tokenizer, ids)
        except (TypeError, ValueError, OverflowError, UserError):
            return {}
        if not "".join(pieces).startswith(text):
            return {}
        return {"pieces": [len(one.encode("utf-16-le")) // 2 for one in pieces]}

    def _alone(self, tokenizer: Tokenizer, id_: int) -> str:
        if id_ not in self._texts:
            self._texts[id_] = tokenizer.decode([id_])
        return self._texts[id_]

    def _load(self) -> Tokenizer | None:
        """Return the tokenizer of the target. None if it is not on this machine."""
        if self._tried:
            return self._tokenizer
        self._tried = True
        from bass_cli.formats.sources import locate
        from bass_cli.formats.tokenizer import Tokenizer

        results, pair = part_of(self._manifest, "results"), part_of(self._manifest, "job", "pair")
        target = self._model or pair.get("tokenizer") or results.get("target")
        folder = pair.get("folder") if self._model is None else None
        if not isinstance(target, str):
            self.notes.append("tokens are not shown: the manifest names no target")
            return None
        try:
            path = locate(
                target, folder=Path(folder) if isinstance(folder, str) else None, fetch=False
            )
            found = Tokenizer.load(path)
        except UserError as error:
            self.notes.append(
                f"tokens are not shown: {error}; the option `model` says where the target is now"
            )
            return None
        if found.fingerprint() != results.get("vocabulary"):
            self.notes.append(f"tokens are not shown: {target} has another tokenizer")
            return None
        self._tokenizer = found
        return self._tokenizer


def _in_context(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds after the ones before it.

    A token that ends within a character adds nothing; the one that completes it adds all of it.
    """
    pieces = []
    start, shown = 0, ""  # where decoding begins, and the text from there that is known
    for place in range(len(ids)):
        text = tokenizer.decode(ids[start : place + 1])
        if text.endswith("\ufffd") and place + 1 - start <= 2 * _BEFORE:
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        if place + 1 - start > _BEFORE:
            start = place
            shown = tokenizer.decode(ids[start : place + 1])
        else:
            shown = text
    return pieces
