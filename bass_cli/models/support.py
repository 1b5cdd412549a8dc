"""The table of architectures: what runs natively, what was tested through transformers' own layers,
and what is refused with its reason.

Apart from any_probe.py, because the command that prints it loads no torch.
tests/model/test_any_model.py draws samples of each tested architecture and checks each reason. An
architecture that is not listed is checked when its files are opened and when it is loaded.
"""

from __future__ import annotations

from typing import NamedTuple

from bass_cli.models.families import FAMILIES

# Tested through transformers; those with a native decoder run so with --decoder transformers only
TESTED = (
    *("apertus", "arcee", "cohere", "cohere2", "deepseek_v3", "diffllama", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma2", "gemma4_text", "glm", "glm4"),
    *("glm4_moe", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "helium"),
    *("hunyuan_v1_dense", "llama", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral3"),
    *("mixtral", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe"),
    *("qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "vaultgemma"),
)
_RECURRENT = "this model keeps state outside of attention"
_NO_ATTENTION = "its layers attend without transformers' AttentionInterface"
_LOST = "its layers do not pass arguments on to attention"
REFUSED = {
    "bart": "it has an encoder",
    "bloom": _NO_ATTENTION,
    "deepseek_v32": _RECURRENT,
    "falcon": _NO_ATTENTION,
    "falcon_h1": _RECURRENT,
    "granitemoehybrid": _RECURRENT,
    "jamba": _RECURRENT,
    "kimi_linear": _RECURRENT,
    "lfm2": _RECURRENT,
    "llama4_text": _RECURRENT,
    "mamba": _RECURRENT,
    "mpt": _NO_ATTENTION,
    "nemotron": _LOST,
    "olmo_hybrid": _RECURRENT,
    "qwen3_5_text": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "rwkv": _NO_ATTENTION,
    "stablelm": _LOST,
}


class Architecture(NamedTuple):
    """A `model_type`, how it runs ("native", "transformers" or "refused"), and why it does not."""

    name: str
    how: str
    reason: str = ""


def architectures() -> tuple[Architecture, ...]:
    """Return the table, by how they run and then by name."""
    native = [Architecture(name, "native") for name in sorted(FAMILIES)]
    other = [Architecture(name, "transformers") for name in TESTED if name not in FAMILIES]
    refused = [
        Architecture(name, "refused", reason)
        for name, reason in REFUSED.items()
        if name not in FAMILIES
    ]
    return (*native, *other, *refused)
