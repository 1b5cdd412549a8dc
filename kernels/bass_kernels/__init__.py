"""The public ops. Each op is defined in plain torch (noise, reference, sampling, acceptance and
others). Some also have a Triton form, which runs on CUDA tensors and must give the same results.

Ops work on tensors only, never on jobs, tokenizers or controllers. Shapes: B rows, W positions a
row, V vocabulary, H query heads, K key/value heads, D head size, S slots of the store of private
keys (each row's own), T positions of the prompt store.
"""

from . import acceptance, delta_rule, experts, host, processing, reference, rounds, sampling
from .delta_rule import DeltaState, DeltaWeights
from .dispatch import (
    attention_schedule,
    by_device,
    compiling,
    has_triton,
    import_kernels,
    kind_for,
    use,
)
from .experts import Clamp, Maps, Shared
from .grouped import GROUP, Grouped, grouped_works
from .host import SPARE_KEYS
from .linear import (
    feed_forward,
    is_packed,
    linear,
    linear_add,
    logits,
    norm_up,
    pack,
    project,
    unpack,
)
from .noise import SHARED, gumbel
from .processing import (
    BITS,
    add_bias,
    count_block,
    count_prompts,
    forbid_words,
    processed_entries,
    report_entries,
)
from .quantised import LAYOUTS, Quantised, Weight, Writable
from .reference import Distances
from .rounds import BINS, ChosenDrafts, ConfidenceStats
from .sampling import COLDEST, HOTTEST, Distribution
from .segments import DeviceGroups, Group, Packed, Segments, Store

embed = by_device(reference.embed, "bass_kernels.pointwise")
norm = by_device(reference.norm, "bass_kernels.pointwise")
activation = by_device(reference.activation, "bass_kernels.pointwise")
angles = by_device(reference.angles, "bass_kernels.pointwise")
gate_outputs = by_device(reference.gate_outputs, "bass_kernels.pointwise")
write_hidden = by_device(reference.write_hidden, "bass_kernels.pointwise")
read_hidden = by_device(reference.read_hidden, "bass_kernels.pointwise")
rope_write = by_device(host.rope_write, "bass_kernels.pointwise")
route = by_device(experts.route, "bass_kernels.router_kernels")
mix_experts = by_device(experts.mix_experts, "bass_kernels.expert_kernels")
delta_round = by_device(delta_rule.delta_round, "bass_kernels.delta_kernels")
delta_prompt = by_device(delta_rule.delta_prompt, "bass_kernels.delta_prompt_kernels")
attention = by_device(host.attention, "bass_kernels.ragged")
sample = by_device(sampling.sample, "bass_kernels.sampling_kernels")
sample_scored = by_device(sampling.sample_scored, "bass_kernels.sampling_kernels")
likeliest_tokens = by_device(processing.likeliest_tokens, "bass_kernels.processing_kernels")
draft_sample = by_device(acceptance.draft_sample, "bass_kernels.acceptance_kernels")
process_logits = by_device(processing.process_logits, "bass_kernels.processing_kernels")
log_probability = by_device(sampling.log_probability, "bass_kernels.processing_kernels")
distances = by_device(reference.distances, "bass_kernels.training_kernels")
distance_gradient = by_device(reference.distance_gradient, "bass_kernels.training_kernels")
rotate = by_device(reference.rotate, "bass_kernels.training_kernels")
gate_gradient = by_device(reference.gate_gradient, "bass_kernels.training_kernels")
prefix_chances = by_device(rounds.prefix_chances, "bass_kernels.round_kernels")
choose_drafts = by_device(rounds.choose_drafts, "bass_kernels.round_kernels")
accept_chosen = by_device(rounds.accept_chosen, "bass_kernels.round_kernels")
rejection_sample = by_device(acceptance.rejection_sample, "bass_kernels.acceptance_kernels")
accept_shared = by_device(acceptance.accept_shared, "bass_kernels.round_kernels")
pending = by_device(rounds.pending, "bass_kernels.round_kernels")
commit = by_device(rounds.commit, "bass_kernels.round_kernels")
report = by_device(rounds.report, "bass_kernels.round_kernels")

__all__ = [
    "BINS",
    "BITS",
    "COLDEST",
    "GROUP",
    "HOTTEST",
    "LAYOUTS",
    "SHARED",
    "SPARE_KEYS",
    "ChosenDrafts",
    "Clamp",
    "ConfidenceStats",
    "DeltaState",
    "DeltaWeights",
    "DeviceGroups",
    "Distances",
    "Distribution",
    "Group",
    "Grouped",
    "Maps",
    "Packed",
    "Quantised",
    "Segments",
    "Shared",
    "Store",
    "Weight",
    "Writable",
    "accept_chosen",
    "accept_shared",
    "activation",
    "add_bias",
    "angles",
    "attention",
    "attention_schedule",
    "choose_drafts",
    "commit",
    "compiling",
    "count_block",
    "count_prompts",
    "delta_prompt",
    "delta_round",
    "distance_gradient",
    "distances",
    "draft_sample",
    "embed",
    "feed_forward",
    "forbid_words",
    "gate_gradient",
    "gate_outputs",
    "grouped_works",
    "gumbel",
    "has_triton",
    "import_kernels",
    "is_packed",
    "kind_for",
    "likeliest_tokens",
    "linear",
    "linear_add",
    "log_probability",
    "logits",
    "mix_experts",
    "norm",
    "norm_up",
    "pack",
    "pending",
    "prefix_chances",
    "process_logits",
    "processed_entries",
    "project",
    "read_hidden",
    "rejection_sample",
    "report",
    "report_entries",
    "rope_write",
    "rotate",
    "route",
    "sample",
    "sample_scored",
    "unpack",
    "use",
    "write_hidden",
]
