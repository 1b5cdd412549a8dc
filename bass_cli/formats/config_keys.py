"""Read the keys of a model's configuration or metadata: checked values, and keys that bass does not
use, which are harmless, refused, or named in a note.

The keys that a family uses are in families.py; what they mean is in hf_config.py, gguf_config.py
and draft_heads.py. tests/model/test_config_keys.py compares the lists with the configuration
classes and the modelling code of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from bass_cli.errors import UserError, first_of, nearest
from bass_cli.models.families import FAMILIES, Family
from bass_cli.reading import finite, shown, text, truth, unquoted, whole

# Upper limits, larger than in any model. A corrupt config must not take much memory before its
# tensors are checked against it.
_MOST = {"layers": 1 << 12, "head_size": 1 << 16, "experts": 1 << 12}
_LARGEST = 2**31 - 1  # of all other sizes
_Value = TypeVar("_Value")
_Self = TypeVar("_Self", bound="Values")


class Values:
    """Checked access to the values of a config, of metadata, or of a mapping inside them.

    Args:
        values: the mapping.
        place: the file's name. A UserError names it and the file's own key.
        keys: the file's key for each word that callers use, if it differs.
        within: the beginning of the keys in the file that `values` leaves out.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        place: str,
        *,
        keys: Mapping[str, str] | None = None,
        within: str = "",
    ):
        self.values, self.place, self.within, self._keys = values, place, within, keys or {}

    def key(self, word: str) -> str:
        return self._keys.get(word, word)

    def get(self, word: str, default: Any = None) -> Any:
        """Return a value as it is. A value of None means the default."""
        value = self.values.get(self.key(word))
        return default if value is None else value

    def error(self, word: str, fault: str) -> UserError:
        """Return the error to raise for a key."""
        return UserError(f'{self.place}: key "{self.within}{self.key(word)}": {fault}')

    def checked(self, word: str, default: Any, check: Callable[[Any], _Value]) -> _Value:
        """Return what `check` makes of a value. Its ValueError becomes the error of the key."""
        value = self.get(word, default)
        if value is None:
            key = f"{self.within}{self.key(word)}"
            raise UserError(f'{self.place}: the key "{key}" is missing')
        try:
            return check(value)
        except ValueError as error:
            raise self.error(word, str(error)) from None

    def number(self, word: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        return self.checked(word, default, _above_0)

    def count(self, word: str, default: int | None = None) -> int:
        """Return a whole number above 0, at most the limit for this word."""
        return self.checked(
            word, default, lambda value: _whole(_above_0(value), _MOST.get(word, _LARGEST))
        )

    def flag(self, word: str, default: bool = False) -> bool:
        return self.checked(word, default, truth)

    def text(self, word: str, default: str | None = None) -> str:
        return self.checked(word, default, text)

    def mapping(self, word: str) -> dict[str, Any]:
        """Return an object; an empty one if it is missing."""
        return dict(self.inside(word).values)

    def inside(self: _Self, word: str) -> _Self:
        """Return access to the object of a key."""
        if not isinstance(value := self.get(word) or {}, Mapping):
            raise self.error(word, f"a mapping is needed, not {shown(value)}")
        return type(self)(value, self.place, within=f"{self.within}{self.key(word)}.")

    def known(self, word: str, choices: Collection[str], what: str, default: Any = None) -> str:
        """Return one of these words; else the error lists them. `what`: what the word names."""
        value = self.get(word, default)
        if isinstance(value, str) and value in choices:
            return value
        given = value if isinstance(value, str) else shown(value)
        close = nearest(given, choices)
        listed = "" if close.startswith("known") else f"; known: {', '.join(choices)}"
        raise self.error(word, f'{what} "{given[:80]}" is not supported; {close}{listed}')


def without_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values whose keys have this prefix, by the rest of their keys."""
    return {k.removeprefix(prefix): value for k, value in values.items() if k.startswith(prefix)}


def _above_0(value: Any) -> float:
    if isinstance(value, (int, float)) and value > 0:
        return finite(value)
    raise ValueError(f"a number above 0 is needed, not {shown(value)}")


def _whole(value: float, most: int) -> int:
    """Convert to an integer. 8.0 is accepted for 8."""
    return whole(int(value) if value.is_integer() else value, least=1, most=most)


# Keys that cannot change the logits of a causal language model: any value is accepted.
_HARMLESS = {
    "bookkeeping": (
        "_name_or_path name_or_path _commit_hash architectures transformers_version dtype "
        "torch_dtype tokenizer_class finetuning_task task_specific_params prefix "
        "unsloth_version unsloth_fixed transformers.js_config is_llama_config "
        "neftune_noise_alpha gradient_checkpointing"
    ),
    "outputs and the cache of transformers": (
        "return_dict output_hidden_states output_attentions torchscript use_cache "
        "cache_implementation tie_last_hidden_states attn_implementation _attn_implementation "
        "_attn_implementation_autoset experts_implementation chunk_size_feed_forward use_bfloat16 "
        "tf_legacy_loss pretraining_tp use_return_dict output_past _attn_implementation_internal "
        "_flash_attn_2_enabled use_flash_attn output_router_logits"
    ),
    "heads for other tasks": (
        "id2label label2id num_labels problem_type is_decoder tie_encoder_decoder "
        "cross_attention_hidden_size summary_type summary_use_proj summary_activation "
        "summary_proj_to_labels summary_first_dropout summary_last_dropout _num_labels "
        "n_special predict_special_tokens"
    ),
    "a format that bass always has, and layers that predict further tokens": (
        "mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings"
    ),
    "training": (
        "initializer_range init_std attention_dropout residual_dropout embedding_dropout "
        "hidden_dropout dropout activation_dropout classifier_dropout layerdrop resid_pdrop "
        "embd_pdrop attn_pdrop router_aux_loss_coef router_jitter_noise"
    ),
    "token ids, and defaults of generation, which bass sets by its own options": (
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id "
        "forced_bos_token_id forced_eos_token_id bad_words_ids begin_suppress_tokens "
        "suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
        "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
        "length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams "
        "num_return_sequences output_scores remove_invalid_values repetition_penalty "
        "return_dict_in_generate temperature top_k top_p typical_p assistant_confidence_threshold "
        "assistant_lookbehind num_assistant_tokens num_assistant_tokens_schedule target_lookbehind"
    ),
    "rounding, copies of the context, a default that transformers writes and ignores": (
        "reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32 "
        "n_ctx seq_length initial_context_length experts_per_token max_sequence_length "
        "model_max_length _sliding_window_pattern"
    ),
}
HARMLESS = frozenset(" ".join(_HARMLESS.values()).split())
# Keys that change the computation in some model's code, with the values that do not.
_NEUTRAL_IF_FALSE = (
    # other shapes of a model
    "is_encoder_decoder add_cross_attention "
    # attention
    "use_bidirectional_attention alibi use_alibi use_qk_norm qk_layernorm attention_sink_bias "
    "attn_output_gate scale_attn_by_inverse_layer_idx "
    # positions
    "rope_interleaved use_mrope "
    # the order of a layer
    "_remove_final_layer_norm parallel_attn use_parallel_residual"
)
_NEUTRAL_IF_TRUE = (
    "is_causal scale_attn_weights rotary use_rope do_layer_norm_before "
    "layer_norm_elementwise_affine"
)
_NEUTRAL_IF_1 = (
    "decoder_sparse_step rotary_pct rope_percent embedding_multiplier residual_multiplier "
    "logits_scaling logit_scale scale_emb"
)
_NEUTRAL_IF_0 = "n_routed_experts num_kv_shared_layers attention_chunk_size no_rope_layer_interval"
_NEUTRAL_IF_NULL = (
    "attn_logit_softcapping final_logit_softcapping clip_qkv v_head_dim attention_multiplier "
    "scale_depth dim_model_base"
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEUTRAL_IF_FALSE.split(), (False,)),
    **dict.fromkeys(_NEUTRAL_IF_TRUE.split(), (True,)),
    **dict.fromkeys(_NEUTRAL_IF_1.split(), (1,)),
    **dict.fromkeys(_NEUTRAL_IF_0.split(), (0,)),
    **dict.fromkeys(_NEUTRAL_IF_NULL.split(), ()),
    **dict.fromkeys(("pruned_heads", "per_layer_config", "text_config", "vision_config"), ({},)),
    **dict.fromkeys(("num_experts", "num_local_experts"), (0, 1)),
    "mlp_only_layers": ([],),
    "kv_sharing_modes": ({}, []),
    "position_embedding_type": ("absolute", "rope"),
    "mlp_type": ("default",),
    "norm_type": ("layer_norm", "rms_norm"),
}
# Switches of NEUTRAL, by model type, that null turns off: the models test them as booleans
_OFF_IF_NULL = {
    "opt": ("do_layer_norm_before", "layer_norm_elementwise_affine"),
    "gpt2": ("scale_attn_weights",),
}
# Keys that say how weights are quantised (quantised_config.py).
QUANTISED = ("quantization_config", "compression_config")
# The keys that each rope type uses besides _EVERY_ROPE.
_ORIGINAL = "original_max_position_embeddings"
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", _ORIGINAL),
}  # fmt: skip
# "finetuned" says how a YaRN model was trained
_EVERY_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
# Keys of some families that configs of other families repeat, with the values that need no note.
_OFF_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    **{flag: (False,) for family in FAMILIES.values() for flag in family.flags},
    "use_sliding_window": (False,),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_LONGEST = 40  # maximum characters of a key or value in a note
_REMEDY = "; `pair.decoder` transformers may run the model"
_NAMED = 12  # maximum keys in a note


def read_keys(config: Mapping[str, Any], family: Family, *, place: str) -> dict[str, Any]:
    """Return the keys of a config that the family uses, with aliases replaced.

    Raises:
        UserError: an unsupported key changes the computation, or two names of one key differ.
    """
    given = Values(config, place)
    others = config.keys() - family.reads - family.aliases.keys()
    refuse_others({key: config[key] for key in others}, NEUTRAL, place=place, remedy=_REMEDY)
    for key in _OFF_IF_NULL.get(str(config.get("model_type")), ()):
        if config.get(key, True) is None:
            raise given.error(key, "None is not supported, only True is")
    layers = None if "no_rope_layers" in family.reads else config.get("no_rope_layers")
    if layers and not (isinstance(layers, list) and all(_equal(one, 1) for one in layers)):
        raise given.error("no_rope_layers", "layers without rotary embedding are not supported")
    read = {key: value for key, value in config.items() if key in family.reads}
    for alias, key in family.aliases.items():
        if (value := config.get(alias)) is None:
            continue
        if read.get(key) not in (None, value):
            raise UserError(
                f'{place}: keys "{alias}" and "{key}" mean the same, but differ: {shown(value)} '
                f"and {shown(read[key])}"
            )
        read[key] = value
    return read


def refuse_others(
    found: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    *,
    place: str,
    prefix: str = "",
    remedy: str = "",
) -> None:
    """Raise a UserError if one of the keys in `neutral` has another value than None and these.

    Args:
        prefix: of the keys in the file.
        remedy: the end of the message.
    """
    for key, values in neutral.items():
        if not is_neutral(found.get(key), values):
            only = f", only {' or '.join(map(repr, values))} is" if values else ""
            fault = f"{shown(found[key])} is not supported{only}{remedy}"
            raise Values(found, place, within=prefix).error(key, fault)


def is_neutral(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value is None or one of these."""
    return value is None or any(_equal(value, one) for one in values)


def _equal(value: Any, neutral: Any) -> bool:
    """Compare two values. True and 1 are different."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def unread(config: Mapping[str, Any], family: Family, *, place: str) -> tuple[str, ...]:
    """Return notes about keys that bass does not use and that are not known to be harmless. Keys
    that are null need none."""
    known = family.reads | family.aliases.keys() | HARMLESS | NEUTRAL.keys()
    known |= {"no_rope_layers", "auto_map", *QUANTISED}
    if not config.get("use_sliding_window"):
        known |= {"max_window_layers"}
    if config.get("rotary_emb_base") == config.get("rope_theta"):
        known |= {"rotary_emb_base"}  # an older name, which CodeQwen 1.5 has beside the new one
    found = {
        key: value
        for key, value in config.items()
        if key not in known and not is_neutral(value, _OFF_ELSEWHERE.get(key, ()))
    }
    if "rope_parameters" in family.reads:
        for name in ("rope_scaling", "rope_parameters"):
            found |= _unread_rope(name, config.get(name))
    notes = name_keys(found, place)
    if _has_own_code(config.get("auto_map")):
        notes += (
            f'{place}: key "auto_map": bass does not run the model\'s own code; it reads the model '
            f"as {config.get('model_type')}",
        )
    return notes


def _has_own_code(auto_map: Any) -> bool:
    """Return whether a folder has its own code for the model, not for its tokenizer only."""
    if isinstance(auto_map, Mapping):
        return any(key != "AutoTokenizer" for key in auto_map)
    return bool(auto_map)


def name_keys(found: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """Return a note that lists keys and values, without those that are null."""
    named = [
        f"{_brief(unquoted(key))} ({_brief(shown(value))})"
        for key, value in found.items()
        if value is not None
    ]
    if not named:
        return ()
    return (
        f"{place}: bass does not read these keys: {first_of(named, _NAMED)}; if one of "
        "them changes what the model computes, the results are wrong",
    )


def _brief(text: str) -> str:
    """Shorten a key or value for a note."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _unread_rope(name: str, found: Any) -> dict[str, Any]:
    """Return the keys of rope parameters that their type does not use."""
    if not isinstance(found, Mapping):
        return {}
    if any(kind in found for kind in _LAYER_TYPES):
        nested = {kind: found.get(kind) for kind in _LAYER_TYPES}
        inner = [_unread_rope(f"{name}.{kind}", value) for kind, value in nested.items()]
        rest = {f"{name}.{key}": value for key, value in found.items() if key not in _LAYER_TYPES}
        return {**rest, **inner[0], **inner[1]}
    kind = found.get("rope_type") or found.get("type") or "default"
    used = (*_EVERY_ROPE, *ROPE_TYPES.get(kind if isinstance(kind, str) else "", ()))
    return {f"{name}.{key}": value for key, value in found.items() if key not in used}
