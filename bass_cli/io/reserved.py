"""The reserved names of a prompt's fields: settings and parts of a prompt that other tools read.

Ignoring such a field would give wrong samples, so it is refused, with what to use instead.
io/prompts.py reads prompts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bass_cli.io.reading import shown

# Reserved fields that set something for the whole run, with the flag that does so:
_FLAGS = {
    **dict.fromkeys(
        (
            *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens_to_sample"),
            *("n_predict", "num_predict", "max_gen_len", "max_gen_toks"),
        ),
        "--max-new-tokens",
    ),
    **dict.fromkeys(
        ("stop_sequences", "stop_strings", "stop_words", "stopping_strings", "stop_token"), "--stop"
    ),
    **dict.fromkeys(
        ("num_return_sequences", "num_samples", "num_completions", "candidate_count"), "--n"
    ),
    **dict.fromkeys(("do_sample", "greedy"), "--temperature"),
    "random_seed": "--seed",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("temperature", "top_p", "top_k", "seed", "stop", "max_new_tokens", "n", "budget"),
            *("pair", "model", "draft", "draft_length", "coupling", "batch_size"),
            *("tensor_parallel", "device", "dtype", "chat", "threads", "limit"),
            *("prompt_column", "token_ids"),
        )
    },
}
# Reserved fields that belong into a message:
_AS_MESSAGE = ("system", "system_prompt", "system_message", "system_instruction")
# Parts of a prompt that bass cannot pass to a model:
_TOOLS = ("tools", "functions")
_UNREADABLE = (
    *_TOOLS,
    *("documents", "images", "image", "image_url", "videos", "audios"),
    *("multi_modal_data", "mm_processor_kwargs", "prompt_token_ids", "prompt_embeds", "input_ids"),
)
_OBJECTS = ("reasoning", "thinking")  # settings if they are objects, else data
# Settings of other engines and servers that bass does not have:
_UNKNOWN = frozenset(
    (
        *("tool_choice", "function_call", "parallel_tool_calls", "response_format", "min_p"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "best_of", "echo"),
        *("suffix", "presence_penalty", "frequency_penalty", "repetition_penalty", "typical_p"),
        *("length_penalty", "bad_words", "min_tokens", "min_new_tokens", "max_length"),
        *("num_beams", "use_beam_search", "stop_token_ids", "eos_token_id", "ignore_eos"),
        *("skip_special_tokens", "include_stop_str_in_output", "modalities", "audio"),
        *("reasoning_effort", "verbosity", "web_search_options", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"),
        *("chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "enable_thinking", "prediction", *_OBJECTS),
        *("repeat_penalty", "repeat_last_n", "no_repeat_ngram_size", "diversity_penalty"),
        *("num_beam_groups", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff"),
        *("top_a", "tfs_z", "mirostat", "dynatemp_range", "dry_multiplier", "penalty_alpha"),
        *("guidance_scale", "negative_prompt", "bad_words_ids", "truncate_prompt_tokens"),
        *("max_time", "num_ctx", "json_schema", "lora_request"),
    )
)
RESERVED = frozenset((*_FLAGS, *_AS_MESSAGE, *_UNREADABLE, *_UNKNOWN))
# Objects that hold the settings in requests to other engines:
_CONTAINERS = (
    *("sampling", "sampling_params", "sampling_parameters", "parameters", "params", "options"),
    *(
        "speculation",
        "generation_config",
        "generation_kwargs",
        "gen_kwargs",
        "generate_kwargs",
        "generation_params",
    ),
    *("config", "settings", "kwargs", "extra_body", "body"),
)
_OWN = ("id", "messages", "reference", "meta")
_META = 'to copy it to the results, put it into "meta": {...}'


def _spelling(name: str) -> str:
    """The name without what spellings of one name differ by: "maxTokens", "Max-Tokens"."""
    return re.sub(r"[\W_]", "", name).lower()


_BY_SPELLING = {_spelling(name): name for name in (*_CONTAINERS, *_OWN, *sorted(RESERVED))}


def reserved_name(key: Any) -> str | None:
    """The reserved name that a key spells; None if there is none."""
    name = _BY_SPELLING.get(_spelling(str(key)))
    return name if name in RESERVED else None


def fault_of(key: Any, value: Any, *, columns: bool) -> tuple[str, str] | None:
    """Return the field and the reason if a field is refused, in any spelling; else None.

    `columns`: the fields are a dataset's columns, of which only tools and system messages are
    refused.
    """
    field, name = shown(key)[1:-1], _BY_SPELLING.get(_spelling(str(key)))
    if name in _OBJECTS and not isinstance(value, Mapping):
        return None
    if name in RESERVED and (name in _TOOLS or name in _AS_MESSAGE or not columns):
        return field, _instead(name)
    if columns:
        return None
    if name in _OWN and key != name:
        return field, f'did you mean "{name}"? Otherwise, {_META}'
    if name in _CONTAINERS and isinstance(value, Mapping):
        for inner in value:
            if (setting := reserved_name(inner)) is not None:
                return f"{field}.{shown(inner)[1:-1]}", _instead(setting)
    return None


def _instead(key: str) -> str:
    """Why a reserved field is refused, and what to do."""
    if key in _AS_MESSAGE:
        return (
            'it is not a field of a prompt; begin "messages" with {"role": "system", "content": '
            f'"..."}}; {_META}'
        )
    if key in _FLAGS:
        return f"set it for the whole run with {_FLAGS[key]}; {_META}"
    if key in _UNREADABLE:
        return f"bass cannot pass it to the model; {_META}"
    return f"bass has no such setting; {_META}"
