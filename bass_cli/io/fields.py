"""Names of fields of a prompt: those that are refused in any spelling, and what to use instead.

io/prompts.py makes prompts of the other fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bass_cli.config.options import LINE
from bass_cli.reading import shown

# Settings and parts of a prompt that other tools read, or that hold for a whole run. Ignoring such
# a field would give wrong samples, so it is refused, with what to use instead.
_OPTIONS = {  # by option, as messages name it
    "sampling.max_new_tokens": "max_new_tokens max_tokens max_completion_tokens max_output_tokens "
    "max_tokens_to_sample n_predict num_predict max_gen_len max_gen_toks",
    "sampling.stop": "stop stop_sequences stop_strings stop_words stopping_strings stop_token",
    "n": "n num_return_sequences num_samples num_completions candidate_count",
    "sampling.temperature": "temperature do_sample greedy",
    "sampling.seed": "seed random_seed",
    "sampling.repetition_penalty": "repetition_penalty repeat_penalty",
    **{f"sampling.{name}": name for name in ("top_p", "top_k", "stop_token_ids")},
    "sampling.include_stop": "include_stop include_stop_str_in_output",
    "sampling.json_schema": "json_schema guided_json response_format structured_outputs",
    "sampling.json_object": "json_object",
    "sampling.regex": "regex guided_regex guided_choice",
    "sampling.grammar": "grammar guided_grammar",
    **{"pair.target": "model", "pair.draft": "draft", "chat=True": "chat"},
    "template": "template chat_template",
    **{"speculation.length": "draft_length", "speculation.coupling": "coupling"},
    **{name: name for name in ("budget", "pair", "batch_size", "tensor_parallel", "device")},
    **{
        name: name
        for name in (
            "dtype",
            "draft_dtype",
            "threads",
            "limit",
            "prompt_column",
            "id_column",
            "echo",
            "token_drafted",
            "decoder",
        )
    },
    "lora": "lora lora_request",
    "kv_dtype": "kv_dtype kv_cache_dtype cache_dtype",
    "strict_fields": "strict_fields",
}
_AS_MESSAGE = "system_prompt system_message system_instruction"
_TOOLS = "functions"
_ARGS = "enable_thinking documents"
_UNREADABLE = (
    "images image image_url videos audios multi_modal_data mm_processor_kwargs prompt_embeds"
)
_OBJECTS = "reasoning thinking"  # settings if they are objects, else data
_UNKNOWN = (
    "tool_choice function_call parallel_tool_calls logprobs top_logprobs "
    "prompt_logprobs best_of suffix "
    "typical_p length_penalty min_tokens min_new_tokens max_length "
    "num_beams use_beam_search eos_token_id ignore_eos skip_special_tokens "
    "modalities audio reasoning_effort verbosity web_search_options "
    "add_generation_prompt continue_final_message prediction repeat_last_n "
    "no_repeat_ngram_size "
    "diversity_penalty num_beam_groups encoder_repetition_penalty epsilon_cutoff eta_cutoff top_a "
    "tfs_z mirostat dynatemp_range dry_multiplier penalty_alpha guidance_scale negative_prompt "
    "bad_words_ids truncate_prompt_tokens max_time num_ctx"
)


def _instead(option: str) -> str:
    """Return what to use instead of another name of this option."""
    field = option.rpartition(".")[2]
    if field in LINE:
        return f'bass calls it "{field}"'
    return f"set it for the whole run with `{option}`"


_IDS = "prompt_token_ids input_ids"
# The reason by reserved name
RESERVED = {
    **{name: _instead(option) for option, names in _OPTIONS.items() for name in names.split()},
    **dict.fromkeys(_AS_MESSAGE.split(), 'use "system"'),
    **dict.fromkeys(_TOOLS.split(), 'use "tools"'),
    **dict.fromkeys(_ARGS.split(), 'put it into "template_args": {...}'),
    **dict.fromkeys(_IDS.split(), 'use "token_ids"'),
    "chat_template_kwargs": 'use "template_args"',
    **dict.fromkeys(_UNREADABLE.split(), "bass cannot pass it to the model"),
    **dict.fromkeys(f"{_UNKNOWN} {_OBJECTS}".split(), "bass has no such setting"),
    **{name: _instead(name) for name in LINE},
}
# Objects that hold the settings in requests to other engines
_CONTAINERS = (
    "sampling sampling_params sampling_parameters parameters params options speculation "
    "generation_config generation_kwargs gen_kwargs generate_kwargs generation_params config "
    "settings kwargs extra_body body"
)
HONOURED = ("system", "tools", "template_args")  # fields that set something for their prompt
OWN = ("id", "messages", "conversations", "token_ids", "reference", "meta", *HONOURED)
_META = 'to copy it to the results, put it into "meta": {...}'


def _spelling(name: str) -> str:
    """Return the name without what spellings of one name differ by: "maxTokens", "Max-Tokens"."""
    return re.sub(r"[\W_]", "", name).lower()


_BY_SPELLING = {_spelling(name): name for name in (*_CONTAINERS.split(), *OWN, *RESERVED)}


def reserved_name(key: Any) -> str | None:
    """Return the reserved name that a key spells; None if there is none."""
    name = _BY_SPELLING.get(_spelling(str(key)))
    return name if name in RESERVED else None


def refusal_of(key: Any, value: Any, *, columns: bool) -> tuple[str, str] | None:
    """Return the field and the reason if a field is refused, in any spelling; else None.

    `columns`: the fields are a dataset's columns, of which only tools and system messages are
    refused.
    """
    field, name = shown(key)[1:-1], _BY_SPELLING.get(_spelling(str(key)), "")
    if name in _OBJECTS.split() and not isinstance(value, Mapping):
        return None
    if name in RESERVED and (not columns or name in f"{_TOOLS} {_AS_MESSAGE}".split()):
        return field, f"{RESERVED[name]}; {_META}"
    if columns:
        return None
    if name in OWN and key != name:
        return field, f'did you mean "{name}"? Otherwise, {_META}'
    if name in _CONTAINERS.split() and isinstance(value, Mapping):
        for inner in value:
            if (setting := reserved_name(inner)) is not None:
                reason = RESERVED[setting]
                if setting in LINE:
                    reason = f'give "{setting}" as a field beside the prompt'
                return f"{field}.{shown(inner)[1:-1]}", f"{reason}; {_META}"
    return None
