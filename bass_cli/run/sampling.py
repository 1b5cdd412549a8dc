"""Make the engine's sampling settings of a row from those of a job or of a prompt's line: bad words
become sequences of token ids, and ids are checked against the vocabulary.

Not here: the options and their bounds (config/), the arithmetic (bass_kernels/processing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bass_cli.config.line import SettingError
from bass_cli.config.sampling import Sampling
from bass_cli.engine.host_state import Report
from bass_cli.engine.sampling import RowSampling
from bass_cli.formats.tokenizer import Tokenizer
from bass_cli.reading import shown

# Texts after which a word is spelled too: some tokenizers write a word differently at the
# beginning of a text, after a space, and inside a text.
_BEFORE = ("", " ", "\n", "a ", "\n ")


def row_sampling(sampling: Sampling, tokenizer: Tokenizer | None) -> RowSampling:
    """Return the settings of a row.

    Args:
        tokenizer: Spells the bad words, and has the model's token ids. None: bad words are left
            out, and ids are not checked.

    Raises:
        SettingError: The model has no such token, or a bad word has no tokens.
    """
    bias, allowed = sampling.logit_bias or {}, sampling.allowed_token_ids
    words = dict[tuple[int, ...], None]()
    if tokenizer is not None and (bias or allowed is not None or sampling.bad_words):
        vocab = min(tokenizer.size, tokenizer.rows or tokenizer.size)
        _check_ids("logit_bias", bias, vocab)
        _check_ids("allowed_token_ids", allowed or (), vocab)
        for text in sampling.bad_words:
            words |= dict.fromkeys(_spellings(text, tokenizer, vocab))
    return RowSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(bias.items()),
        bad_words=tuple(words),
        allowed_token_ids=None if allowed is None else tuple(allowed),
    )


def _check_ids(field: str, ids: Iterable[int], vocab: int) -> None:
    beyond = next((id_ for id_ in ids if id_ >= vocab), None)
    if beyond is not None:
        raise SettingError(field, f"there is no token {beyond}; the model has 0 to {vocab - 1}")


def _spellings(text: str, tokenizer: Tokenizer, vocab: int) -> Iterator[tuple[int, ...]]:
    """Yield the token sequences of a word: as it is, and after a space, at the beginning of a text
    and inside one."""
    found = False
    for before in _BEFORE:
        head = tokenizer.encode_part(before) if before.strip(" ") else []
        ids = tokenizer.encode_part(before + text)
        word = ids[len(head) :]
        if ids[: len(head)] == head and word and max(word) < vocab:
            found = True
            yield tuple(word)
    if not found:
        raise SettingError("bad_words", f"{shown(text)} has no tokens of this model")


def report_of(sampling: Sampling) -> Report:
    """Return what rounds report of a sample's tokens."""
    top = sampling.logprobs
    if top is None or sampling.logprobs_of == "model":
        return Report(top or 0)
    return Report(processed=top)
