"""Open the files of a job's pair and check them against each other.

The files are checkpoints, the tokenizer and the profile of round costs. This module also computes
how far drafts reach. plan.py chooses device, memory and rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bass_cli.config.job import Job, Pair
from bass_cli.config.line import SettingError
from bass_cli.config.speculation import Draft, needs_profile, parse_draft, parse_layers
from bass_cli.engine.verify import CHEAP, Cut
from bass_cli.errors import MachineError, UserError
from bass_cli.formats.checkpoint import Checkpoint, open_checkpoint
from bass_cli.formats.completion_text import ending_ids, tags_of
from bass_cli.formats.draft_heads import NoLayerError, open_head, open_mtp
from bass_cli.formats.grammars import grammars_of
from bass_cli.formats.grouped_weights import file_layouts
from bass_cli.formats.lora import locate_adapters
from bass_cli.formats.sources import locate
from bass_cli.formats.tokenizer import Tokenizer, check_same_vocabulary
from bass_cli.lengths.surface import Surface, load_surface, profile_path
from bass_cli.models.partition import check_divisible
from bass_cli.models.spec import AnySpec, HeadSpec, Spec, parameters
from bass_cli.run.sampling import row_sampling
from bass_kernels import LAYOUTS, grouped_works

_E4M3 = (8, 9)  # the compute capability from which GPUs compute with e4m3 numbers
# Formats of a draft that reads hidden states
_OF_HEADS = ("auto", "target", "fp8", "int8")
# Tokens drafted beyond those verified where rows are cut (docs/decisions/06-verified-drafts.md):
# two gain three quarters of what four gain. A pass takes two places for each, except for a whole
# block.
_MORE, _WHOLE = 2, 4
# The longest draft of mtp, if `speculation.max` is not set. Each further token takes a pass of
# the layer, and 2 MB of every sequence of a 27B with recurrent layers: 80 GB hold 58 sequences of
# 1,024 new tokens with drafts up to 8, and 41 with drafts up to 32. Where a draft token takes a
# twentieth of a round, longer drafts pay at acceptance rates above 0.8 only.
_LONGEST_MTP = 8
# The largest draft, as a share of the target's size, for which that pays: the two extra tokens take
# four positions of the draft's pass, for a gain of a twentieth of a round. On a GPU a part of the
# pass is reading weights, which takes no longer.
_DEAR = {"cpu": 1 / 16, "cuda": 1 / 8}


class Files(NamedTuple):
    """A pair's opened checkpoints and tokenizer.

    Args:
        draft: The draft's checkpoint; None if no model drafts.
        draft_vocab: The number of ids that the draft may propose.
        mask: The mask token of a parallel draft; None for other drafts.
        skipped: The target's layers that a draft of the kind skip:LAYERS skips.
        chosen_draft: The pair's `draft`, chosen if it depends on the target's checkpoint.
        draft_note: A note to the user on that choice; None if there is nothing to say.
    """

    target: Checkpoint
    tokenizer: Tokenizer
    draft: Checkpoint | None
    draft_vocab: int
    mask: int | None
    skipped: frozenset[int]
    chosen_draft: str = "none"
    draft_note: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user on the models' configurations, without duplicates."""
        opened = (self.target,) if self.draft is None else (self.target, self.draft)
        notes = dict.fromkeys(note for one in opened for note in one.notes)
        if self.draft_note is not None:
            notes[self.draft_note] = None
        vocab = self.target.spec.vocab
        beyond = [id_ for id_ in self.target.eos_ids or self.tokenizer.eos_ids if id_ >= vocab]
        if beyond:
            ids = ", ".join(map(str, beyond))
            notes[
                f"{self.target.path}: eos_token_id {ids}: the model has {vocab} ids, so no sample "
                "ends there"
            ] = None
        return tuple(notes)


def open_files(job: Job, early: Callable[[], Tokenizer | None] = lambda: None) -> Files:
    """Open the checkpoints and the tokenizer of a job's pair.

    `early` returns the tokenizer that tokenizer.begin loaded, or None.

    Raises:
        UserError: They do not fit each other, or the job.
    """
    pair = job.pair
    target_path = locate(pair.target, folder=pair.folder, weights=True)
    adapters = locate_adapters(job.lora, pair.folder)
    target = open_checkpoint(target_path, adapters, decoder=pair.decoder)
    chosen, draft, note = _choose_draft(job, target)
    job, parsed = with_draft(job, chosen), parse_draft(chosen)
    if parsed.files is not None:
        draft = _open_draft(parsed, job.pair, target.spec)
    in_one_pass = parsed.kind.parallel or parsed.kind.reads
    mask = draft.mask() if draft is not None and in_one_pass else None
    skipped = _skipped_layers(parsed, target.spec.layers)
    _check_settings(job, target.spec, skipped)
    tokenizer = early()
    if tokenizer is None and pair.tokenizer:
        tokenizer = Tokenizer.load(locate(pair.tokenizer, folder=pair.folder))
    elif tokenizer is None:
        tokenizer = Tokenizer.load(target_path, vocabulary=target.vocabulary)
    if job.template is not None:
        tokenizer = tokenizer.with_template(job.template)
    tokenizer.rows = target.spec.vocab
    _check_sampling(job, target, tokenizer)
    draft_vocab = min(tokenizer.size, target.spec.vocab)
    if draft is not None and parsed.kind.weights == "model":
        draft_tokenizer = Tokenizer.load(draft.path, vocabulary=draft.vocabulary)
        check_same_vocabulary(tokenizer, draft_tokenizer)
        draft_vocab = min(draft_vocab, draft_tokenizer.size, draft.spec.vocab)
    _check_chats(job, tokenizer)
    return Files(target, tokenizer, draft, draft_vocab, mask, skipped, chosen, note)


def _open_draft(parsed: Draft, pair: Pair, target: Spec) -> Checkpoint:
    """Open the files of a draft model, or of a head that reads the target's hidden states."""
    assert parsed.files is not None
    path = locate(parsed.files, folder=pair.folder, weights=True)
    if parsed.kind.reads:
        return open_head(path, target)
    return open_checkpoint(path, decoder=pair.decoder)


def _check_sampling(job: Job, target: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise UserError for sampling settings that the model's tokens do not allow."""
    sampling = job.sampling
    ending_ids(tokenizer, sampling.stop, sampling.stop_token_ids, vocab=target.spec.vocab)
    try:
        row_sampling(sampling, tokenizer)
        if sampling.structure is not None:
            eos_ids = frozenset(target.eos_ids).union(tokenizer.eos_ids)
            vocab = min(tokenizer.size, target.spec.vocab)
            grammars_of(tokenizer, vocab, eos_ids).matcher(sampling.structure)
    except SettingError as error:
        raise UserError(f"`sampling.{error.field}`: {error}") from None


def _check_chats(job: Job, tokenizer: Tokenizer) -> None:
    """Raise UserError for settings of chats and thinking that the model's template lacks."""
    if job.chats and not tokenizer.has_chat_template:
        wanted = "chat=True" if job.chat else "tools" if job.system is None else "system"
        raise UserError(f"`{wanted}`: {job.pair.target} has no chat template")
    if job.template is not None or job.template_args or job.tools is not None:
        tokenizer.check_chats(job.tools, job.template_args or {})
    if job.sampling.max_thinking_tokens is not None and tags_of(tokenizer) is None:
        raise UserError(
            f"`sampling.max_thinking_tokens`: {job.pair.target} has no thinking part that bass "
            "knows"
        )


def choose_draft(job: Job) -> Job:
    """Return the job with a draft that does not depend on the target's checkpoint.

    Only then the target's headers are read. UserError as in `open_files`.
    """
    pair = job.pair
    if parse_draft(pair.draft).otherwise is None:
        return job
    path = locate(pair.target, folder=pair.folder, weights=True)
    return with_draft(job, _choose_draft(job, open_checkpoint(path, decoder=pair.decoder))[0])


def with_draft(job: Job, draft: str) -> Job:
    """Return the job with this draft, and for mtp with its longest draft, if that is not set and
    a controller chooses the length."""
    found = job.model_copy(update={"pair": job.pair.model_copy(update={"draft": draft})})
    speculation = job.speculation
    fixed = isinstance(speculation.length, int)
    if parse_draft(draft).kind.weights != "layer" or fixed or "max" in speculation.model_fields_set:
        return found
    own = speculation.model_copy(update={"max": _LONGEST_MTP})
    return found.model_copy(update={"speculation": own})


def _choose_draft(job: Job, target: Checkpoint) -> tuple[str, Checkpoint | None, str | None]:
    """Choose the draft of a job for an opened target.

    Returns: the draft, the layer of the target's checkpoint if it is mtp, and a note to the user if
        the draft was chosen here.
    """
    draft = job.pair.draft
    kind, _, otherwise = parse_draft(draft)
    if kind.weights != "layer":
        return draft, None, None
    if otherwise is None:
        return draft, open_mtp(target), None
    if job.speculation.length == 0:  # the layer would take memory for nothing
        return otherwise, None, None
    try:
        layer = open_mtp(target)
    except NoLayerError:
        return otherwise, None, None
    except UserError as error:
        return otherwise, None, f"the draft is {otherwise}, not {kind.word}: {error}"
    note = f"the draft is {kind.word}, {kind.text}; `pair.draft` {otherwise} leaves it out"
    return kind.word, layer, note


def _skipped_layers(draft: Draft, layers: int) -> frozenset[int]:
    """Return the target's layers that a draft skips; none unless it is skip:LAYERS.

    UserError unless they are some, but not all, of the target's layers.
    """
    if draft.kind.weights != "target":
        return frozenset()
    runs = parse_layers(draft.argument)
    inside = all(last < layers for _, last in runs)
    found = {layer for first, last in runs for layer in range(first, last + 1) if inside}
    if not inside or len(found) == layers:
        raise UserError(
            f'draft "skip:{draft.argument}": the target has layers 0 to {layers - 1}; skip at '
            "least one and not all"
        )
    return frozenset(found)


def check_draft_dtype(job: Job, draft: Checkpoint | None) -> None:
    """Raise a UserError if the draft has no numbers of its own, or cannot have this format."""
    reads = draft is not None and draft.head is not None
    check_format_of_draft(job, loads=draft is not None, reads_hidden=reads)
    if draft is not None and isinstance(draft.spec, AnySpec) and job.draft_dtype in LAYOUTS:
        raise UserError(
            f"`draft_dtype` {job.draft_dtype}: the draft {job.pair.draft} runs through "
            "transformers' own layers, which have no 8-bit form here; use bf16"
        )


def with_stored_dtype(job: Job, target: Checkpoint, device: torch.device) -> Job:
    """Return the job with the format of the target's files, where `dtype` is auto: on a GPU 8 bits
    with scales by row, on a CPU the numbers of a GGUF file. Otherwise a CPU computes in float32.
    In both formats of a CPU drafts change no token."""
    if job.dtype != "auto":
        return job
    kept = target.by_row if device.type == "cuda" else None
    if device.type == "cpu" and job.tensor_parallel == 1 and grouped_works():
        kept = file_layouts(target).layers
    return job if kept is None else job.model_copy(update={"dtype": kept})


def with_draft_format(job: Job, head: HeadSpec | None, device: torch.device) -> Job:
    """Return the job with the layer of mtp and its copy of the head in fp8, if `draft_dtype` is
    auto, the target has 16 bits or fewer, and the GPU computes with such numbers.

    On an H100 a round of Qwen3.5-27B with three drafts takes 7 % less then: a draft token reads the
    head, which has three quarters of its weights.
    """
    wide = job.dtype not in ("auto", "bf16", "fp8", "int8")
    if head is None or not head.joins or job.draft_dtype != "auto" or wide:
        return job
    here = device.type == "cuda" and torch.cuda.is_available()  # not if others run the job
    native = here and torch.cuda.get_device_capability(device) >= _E4M3
    return job.model_copy(update={"draft_dtype": "fp8"}) if native else job


def check_format_of_draft(job: Job, *, loads: bool, reads_hidden: bool) -> None:
    """Raise a UserError if a draft of this kind cannot have the job's `draft_dtype`.

    Args:
        loads: whether it has weights of its own.
        reads_hidden: whether it reads hidden states.
    """
    wanted = job.draft_dtype
    if wanted != "auto" and not loads:
        raise UserError(
            f"`draft_dtype` {wanted}: the draft {job.pair.draft} loads no weights; leave it out"
        )
    if reads_hidden and wanted not in _OF_HEADS:
        raise UserError(
            f"`draft_dtype` {wanted}: a draft that reads hidden states computes in the target's "
            f"format; use one of {', '.join(_OF_HEADS)}"
        )


def _check_settings(job: Job, spec: Spec, skipped: frozenset[int]) -> None:
    """Raise UserError for a draft length without a draft, and for what a target whose layers
    transformers runs does not support."""
    if job.pair.draft == "none" and job.speculation.length not in ("auto", 0):
        raise UserError(
            f'pair "{job.pair.name}": there is no draft, so draft length '
            f"{job.speculation.length} has no meaning; leave the length out, or name a `pair.draft`"
        )
    if skipped.issuperset(spec.attention_layers):
        raise UserError(
            f"`pair.draft` {job.pair.draft}: no layer with attention is left; keep one of "
            f"{', '.join(map(str, spec.attention_layers))}"
        )
    if not isinstance(spec, AnySpec):
        return
    target = f"{job.pair.target} runs through transformers' own layers"
    if job.dtype in ("fp8", "int8"):
        raise UserError(f"`dtype` {job.dtype}: {target}, which have no 8-bit form here; use bf16")
    readers = sorted({call.layer for call in spec.calls if not call.writes})
    if skipped and readers:
        raise UserError(
            f"`pair.draft` {job.pair.draft}: {target}, and layer {readers[0]} reads the keys of an "
            "earlier layer, so no layer can be skipped; use another draft"
        )


def costs_of(
    job: Job, files: Files, device: torch.device, dtype: str, note: Callable[[str], None]
) -> tuple[Path | None, Surface | None]:
    """Return the file of round costs and its content, each None if there is none.

    UserError if the draft length needs a profile and there is none.
    """
    pair, profile, surface, ignored = job.pair, None, None, list[str]()
    if pair.draft != "none":
        profile = profile_path(
            target=files.target.fingerprint(),
            draft=pair.draft if files.draft is None else files.draft.fingerprint(files.mask),
            device=device,
            dtype=dtype,
            kv_dtype=job.kv_dtype,
            threads=job.threads,
            ranks=job.tensor_parallel,
        )
        surface = load_surface(profile, ignored.append)
        for text in ignored:
            note(text)
    needed = needs_profile([job.speculation.length])
    if needed and job.tensor_parallel > 1:
        raise UserError(
            f"`speculation.length` {job.speculation.length} and `tensor_parallel` exclude each "
            "other: bass profile measures one device; use auto or bass"
        )
    if needed and not (surface and surface.measured):
        missing = f'pair "{pair.name}" has no profile on this device yet'
        raise UserError(
            f"`speculation.length` {job.speculation.length}: {ignored[0] if ignored else missing}; "
            "make one with bass profile and the same `pair` (or `pair.target`) and `pair.draft`, "
            "or use auto or bass"
        )
    return profile, surface


def check_ranks(job: Job, files: Files, device: torch.device) -> None:
    """Raise UserError if the target cannot be split over the devices, MachineError if there are
    too few."""
    ranks = job.tensor_parallel
    if ranks == 1:
        return
    check_split(files.target.spec, ranks, device, model=job.pair.target)


def check_split(spec: Spec, ranks: int, device: torch.device, *, model: str) -> None:
    """Check that a model can be split over `ranks` devices; see check_ranks."""
    check_divisible(spec, ranks, model=model)
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        raise MachineError(
            f"`tensor_parallel` {ranks}: this process sees {torch.cuda.device_count()} GPUs"
        )


def tokens_of(prompt: str | list[int], tokenizer: Tokenizer, context: int) -> int:
    """Return the number of a prompt's tokens, at most the context. `prompt`: its text or ids."""
    if not isinstance(prompt, str):
        return min(len(prompt), context)
    # only the length counts here; invalid text fails later
    text = prompt.encode(errors="replace").decode()
    try:
        return min(len(tokenizer.encode(text, context)), context) if text else 0
    except UserError:  # too long, or it has a token that the model lacks
        return min(len(text.encode()), context)


def reach(job: Job, files: Files, device: torch.device) -> int:
    """Return how many positions beyond its last token a round may write for a row.

    A block is written whole, even if fewer drafts are verified.
    """
    head = None if files.draft is None else files.draft.head
    longest, cut = longest_draft(job), cut_of(job, files, device)
    longest = longest if cut is None else cut.drafted(longest)
    return max(longest, 0 if head is None else head.block)


def cut_of(job: Job, files: Files, device: torch.device) -> Cut | None:
    """Return the rule by which the draft's confidence truncates drafts; None if they are not.

    Drafts are truncated if one pass drafts all tokens, the target is not split, the coupling is
    shared, and the draft is small enough for extra tokens to pay.
    """
    draft, most = files.draft, job.speculation.max
    if job.speculation.coupling == "maximal" or job.tensor_parallel > 1 or draft is None:
        return None
    above = CHEAP[device.type]
    if draft.head is not None:  # its block is always drafted whole
        return Cut(min(draft.head.drafts, most), above, _WHOLE) if draft.head.block else None
    own, target = (
        sum(map(math.prod, parameters(spec).values())) for spec in (draft.spec, files.target.spec)
    )
    pays = files.mask is not None and own <= _DEAR[device.type] * target
    return Cut(most, above, _MORE) if pays else None


def longest_draft(job: Job) -> int:
    """Return the longest draft that a job may use, in tokens."""
    if job.pair.draft == "none":
        return 0
    length = job.speculation.length
    return length if isinstance(length, int) else job.speculation.max
