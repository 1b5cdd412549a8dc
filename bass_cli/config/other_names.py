"""Names that other tools give to options of bass, so that messages can name the right one."""

import re

from bass_cli.config.options import JOB

# By the path of an option. In a line of a prompt file these names are refused, because ignoring
# such a field would give wrong samples.
OTHER_NAMES = {
    "sampling.max_new_tokens": "max_tokens max_completion_tokens max_output_tokens "
    "max_tokens_to_sample n_predict num_predict max_gen_len max_gen_toks",
    "sampling.stop": "stop_sequences stop_strings stop_words stopping_strings stop_token",
    "n": "num_return_sequences num_samples num_completions candidate_count",
    "sampling.temperature": "do_sample greedy",
    "sampling.seed": "random_seed",
    "sampling.repetition_penalty": "repeat_penalty",
    "sampling.include_stop": "include_stop_str_in_output",
    "sampling.json_schema": "guided_json response_format structured_outputs",
    "sampling.regex": "guided_regex guided_choice",
    "sampling.grammar": "guided_grammar",
    "chat=True": "chat",
    "pair": "pair",
    "template": "chat_template",
    "lora": "lora_request",
    "kv_dtype": "kv_cache_dtype cache_dtype",
}
# Further names, which may be columns of a data set
_OF_PROGRAMS = {
    "sampling.max_new_tokens": "max_length max_length_generation n_tokens",
    "sampling.temperature": "temp",
    "n": "n_samples samples num_generations",
    "model": "model_path model_name model_name_or_path pretrained hf_repo",
    "draft": "draft_model model_draft assistant_model speculative_model",
    "dtype": "torch_dtype precision quantization load_in_8bit load_in_4bit",
    "batch_size": "max_num_seqs max_batch_size parallel",
    "tensor_parallel": "tensor_parallel_size tp tp_size",
    "lora": "lora_modules adapter peft lora_path",
    "limit": "max_samples num_examples",
}


def spelling(name: str) -> str:
    """Return the name without what spellings of one name differ by: "maxTokens", "Max-Tokens"."""
    return re.sub(r"[\W_]", "", name).lower()


_PATHS = {
    **{
        spelling(name): name if option.path.startswith("pair.") else option.path
        for name, option in JOB.items()
    },
    **{
        spelling(name): path
        for names_by_path in (_OF_PROGRAMS, OTHER_NAMES)
        for path, names in names_by_path.items()
        for name in names.split()
        if "=" not in path
    },
}


def option_called(name: str) -> str | None:
    """Return the path in a Job of the option that has this name here or elsewhere, in any spelling.

    None if it is unknown.
    """
    return _PATHS.get(spelling(name))
