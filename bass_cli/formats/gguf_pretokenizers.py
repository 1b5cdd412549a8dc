r"""The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`, as data.

Names, flags and groups come from llama.cpp's src/llama-vocab.cpp at commit 0c1e570, as in
llama-cpp-python 0.3.36. Patterns come from the models' published tokenizer.json if llama.cpp quotes
or adapts it, else from llama.cpp. docs/FORMATS.md lists the differences. Not here: the rest of a
tokenizer (gguf_tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# A pattern, or the name and arguments of a class of tokenizers.pre_tokenizers
Step = str | tuple[str, Mapping[str, Any]]

# Turns text into GPT-2's byte alphabet, and splits it by GPT-2's pattern first
_GPT2: Step = "ByteLevel", {"add_prefix_space": False, "use_regex": True}
# The same pattern for groups with more steps after it: the byte alphabet must come last.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS: Step = "Digits", {"individual_digits": True}
_PUNCTUATION: Step = "Punctuation", {"behavior": "contiguous"}
_NUMBERS: Step = "Digits", {"individual_digits": False}

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_ENGLISH}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
)
_CASED_ENGLISH = _CASED.replace("%s", f"{_ENGLISH}?")
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED.replace('%s', '')}|\p{{N}}|{_SLASHED}|{_SPACES}"
_GPT4O = rf"{_CASED_ENGLISH}|\p{{N}}{{1,3}}|{_SLASHED}|{_SPACES}"
_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_HAN[0]}*{_HAN[1]}+{_ENGLISH}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN[0]}+{_HAN[1]}*{_ENGLISH}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
)
_ASCII = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, rf"{_ASCII}|{_MARKED}[\r\n]*|{_SPACES}")
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LATIN = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-"
    "\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-"
    "\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-"
    "\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-"
    "\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-"
    "\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-"
    "\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-"
    "\U0001e943"
)
_ASIAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff"
)
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # groups of three, from the right
_LINES = r"[^\n]+|[\n]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_WIDE_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))


class PreTokenizer(NamedTuple):
    """The meaning of a value of `tokenizer.ggml.pre`.

    steps: patterns that split a text at their matches, or other pre-tokenizers.
    ignore_merges: whether a piece that is a token becomes this token without merges.
    add_bos: whether a prompt begins with BOS if the file has no `add_bos_token`.
    nfc: whether text is normalised to NFC.
    plain: whether tokens are plain text instead of GPT-2's byte alphabet, with "▁" for spaces and
        tokens like <0x0A> for bytes of characters that have no token.
    """

    steps: tuple[Step, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    plain: bool = False


_DIGITS_GPT2 = PreTokenizer((_DIGITS, _GPT2))
# By names, separated by spaces. All names of llama.cpp are here, and no others.
_GROUPS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_ENGLISH}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"), ignore_merges=True
    ),
    "jais-2": PreTokenizer(
        (
            rf"{_ENGLISH}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|{_WIDE_SPACES}"
            r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_LATIN}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_HAN,
            _DIGITS,
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, _DIGITS)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK3),
    "spark2_5": PreTokenizer(
        (r"\p{N}{1,3}", _CJK, rf"{_ASCII}|{_MARKED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
    ),
    "youtu": PreTokenizer(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            rf"{_CASED_ENGLISH}|\p{{N}}|{_SLASHED}|{_SPACES}",
        ),
        ignore_merges=True,
    ),
    "falcon": PreTokenizer((_PUNCTUATION, _GPT2, _NUMBERS, r"[0-9][0-9][0-9]")),
    "mpt olmo modern-bert": PreTokenizer((_GPT2,), nfc=True),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum jina-v1-en "
    "jina-v2-code roberta-bpe jais exaone4 trillion granite-docling": PreTokenizer((_GPT2,)),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2._replace(nfc=True),
    "qwen2 deepseek-r1-qwen megrez f2llmv2": PreTokenizer((_QWEN2,), nfc=True),
    "kormo stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGITS,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((_THREES, _GPT4O)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": PreTokenizer(
        (rf"{_ENGLISH}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}",)),
    "afmoe": PreTokenizer((_THREES, f"[{_ASIAN}]+", rf"{_ASCII}|{_MARKED}[\r\n]*|{_SPACES}")),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gemma4 granite-embed-multi-311m": PreTokenizer((_LINES,), add_bos=True, plain=True),
    "sarvam-moe": PreTokenizer((_LINES,), plain=True),
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: kind for names, kind in _GROUPS.items() for name in names.split()
}
