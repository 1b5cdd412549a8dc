"""The token ids that end a sample: those that the files name, and those with a well-known text.

Hub folders and GGUF files follow one rule, so that both forms of a model end samples alike. The
texts are those of llama.cpp (src/llama-vocab.cpp at commit 0c1e570, `special_eog_ids`). Not here:
reading the files (checkpoint.py, gguf_tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Container, Mapping

# A token with one of these texts ends a sample, even if the file says that it is not special.
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
# These end a sample too, unless the file names a token for the role.
ROLE_TEXTS: dict[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# The roles by which a GGUF file names tokens that end a sample: `tokenizer.ggml.eos_token_id`, ...
END_ROLES = ("eos", "eot", "eom", *ROLE_TEXTS)
# This text ends a sample only if the token is special: in Gemma's vocabulary it is an HTML tag.
_TAG = "</s>"
# With one of these tokens in the vocabulary, "</s>" is ordinary text.
_TAG_IS_TEXT = ("<|tool_response>", "<|plamo:eos|>")
# In formats with one of each of the following, "<|end|>" closes a part of an answer only.
_PARTS = "<|end|>"
_CALLS, _FINALS = ("<|call|>", "<|calls|>"), ("<|return|>", "<|flush|>")


def end_ids(
    ids: Mapping[str, int], *, special: Container[str], named: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the ids that end a sample.

    Args:
        ids: the vocabulary, id by text.
        special: texts of the special (control) tokens.
        named: ids that the files name, by role (END_ROLES). All of them end a sample.

    Returns:
        The ids in ascending order; empty if there are none.
    """
    texts = {*END_TEXTS, *([_TAG] if _TAG in special else [])}
    for role, choices in ROLE_TEXTS.items():
        if role not in named:
            texts.update(choices)
    texts.intersection_update(ids)
    if any(text in ids for text in _TAG_IS_TEXT):
        texts.discard(_TAG)
    if not texts.isdisjoint(_CALLS) and not texts.isdisjoint(_FINALS):
        texts.discard(_PARTS)
    return tuple(sorted({*(ids[text] for text in texts), *named.values()}))
