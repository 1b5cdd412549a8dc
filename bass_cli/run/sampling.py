"""Sampling settings: those of a model's own files (generation_config.json, or a GGUF header), and
the engine's settings of a row, with bad words as token ids.

Settings of a model hold where neither flags, environment, Job nor pair file set the field. Not
here: the options and their bounds (config/), the arithmetic (bass_kernels/processing.py), the ids
that end a sample (formats/checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from bass_cli.config.job import Job
from bass_cli.config.line import SettingError
from bass_cli.config.sampling import Sampling
from bass_cli.config.validation import reason_of
from bass_cli.engine.host_state import Report
from bass_cli.engine.sampling import RowSampling
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import Checkpoint
from bass_cli.formats.sources import read_json
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


# Fields of Sampling that generation_config.json may set, if this version of Sampling has them
_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_GGUF = "general.sampling."
# A GGUF file's keys. Its penalty covers a window of tokens, so it is another distribution.
_GGUF_KEYS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
# Other settings that change the distribution, with the values that change nothing
_OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "min_length"), (0,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "suppress_tokens"), ([],)),
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias", "penalty_alpha"), ([],)),
    **dict.fromkeys(("min_new_tokens", "forced_bos_token_id", "forced_eos_token_id"), (0,)),
    **dict.fromkeys(("num_beams", "penalty_repeat", "top_h"), (1,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "stop_strings"), ([],)),
    "watermarking_config": (),
    **dict.fromkeys(("xtc_probability", "mirostat"), (0,)),
}


def with_model_defaults(job: Job, target: Checkpoint) -> tuple[Job, list[str]]:
    """Fill in sampling settings that are not set; return the job and notes for the user.

    A second call changes nothing. `do_sample` is not followed: samples are drawn, at temperature 0
    only if that is set.

    Raises:
        UserError: a value is invalid; the message names file and key.
    """
    if job.generation_config == "none":
        return job, []
    place, given = _settings(target)
    names = [name for name in _FIELDS if name in Sampling.model_fields]
    values = {name: given[name] for name in names if given.get(name) is not None}
    for name, value in values.items():
        _check(name, value, place)
    own = job.sampling.model_fields_set
    taken = {name: value for name, value in values.items() if name not in own}
    ignored = [name for name in (*_FIELDS, *_OTHERS) if _is_ignored(name, given, names)]
    update = {name: getattr(Sampling(**taken), name) for name in taken}
    sampling = job.sampling.model_copy(update=update)  # keeps a command's own defaults
    changed = job.model_copy(update={"sampling": sampling})
    return changed, [note] if (note := _note(changed, given, taken, ignored, place)) else []


def _settings(target: Checkpoint) -> tuple[str, Mapping[str, Any]]:
    """Return the place of a model's settings and their values by the names of Sampling."""
    if not target.path.is_dir():
        found = {
            key.removeprefix(_GGUF): value
            for key, value in target.metadata.items()
            if key.startswith(_GGUF)
        }
        named = {ours: found[key] for ours, key in _GGUF_KEYS.items() if key in found}
        return str(target.path), found | named
    path = target.path / "generation_config.json"
    return str(path), read_json(path) if path.exists() else {}


def _check(name: str, value: Any, place: str) -> None:
    """Raise UserError if this is not a value of the field."""
    try:
        Sampling.model_validate({name: value}, strict=isinstance(value, str))
    except ValidationError as error:
        reason = reason_of(error.errors(include_url=False)[0])
        raise UserError(
            f'{place}: key "{name}": {reason}; `generation_config` none uses bass\'s own settings'
        ) from None


def _is_ignored(name: str, given: Mapping[str, Any], known: list[str]) -> bool:
    """Whether a setting of the file changes the distribution and is not used."""
    value = given.get(name)
    neutral = _OTHERS.get(name, (0, 1))
    return name not in known and value is not None and value is not False and value not in neutral


def _note(
    job: Job, given: Mapping[str, Any], taken: Mapping[str, Any], ignored: list[str], place: str
) -> str | None:
    """Describe what was taken from the model's files; None if nothing was."""
    parts = []
    if taken:
        values = ", ".join(f"{name} {value:g}" for name, value in taken.items())
        parts.append(f"the model's own {values} (`generation_config` none: bass's own)")
    if given.get("do_sample") is False and "temperature" not in job.sampling.model_fields_set:
        parts.append(
            f"do_sample false is not followed: the temperature is {job.sampling.temperature:g} "
            "(`sampling.temperature` 0: greedy decoding)"
        )
    if ignored:
        parts.append(f"bass does not use {', '.join(ignored)}")
    return f"{place}: {'; '.join(parts)}" if parts else None
