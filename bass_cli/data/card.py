"""Write the card of a data set of samples: what they are, how they were made, how to load them.

The head is YAML, as the Hugging Face hub reads it. The card says that a model wrote the texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from bass_cli import __version__

MARK = "<!-- made by bass -->"  # in the cards that bass may replace
# The hub's words for the number of lines
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"),
          (10_000_000, "1M<n<10M"), (100_000_000, "10M<n<100M"))  # fmt: skip
_LARGEST = "n>100M"
# Settings of a manifest that the card lists, in this order; others are in the manifest
_SETTINGS = (
    *("target", "dtype", "lora", "task", "n", "seed", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "max_new_tokens", "stop"),
    *("system", "thinking", "budget", "coupling", "filter", "best_of", "rank_by"),
)
_EMPTY: tuple[Any, ...] = (None, [], {}, "")


def card_of(name: str, file: str, manifest: Mapping[str, Any], licence: str | None) -> str:
    """Return the card.

    Args:
        name: USER/NAME.
        file: The name of the file of samples in the data set.
        manifest: The manifest of the file.
        licence: The hub's word for the target's licence; None if it is unknown.
    """
    results, totals = manifest["results"], manifest["totals"]
    head = {
        "pretty_name": name.split("/")[1],
        **({} if licence is None else {"license": licence}),
        "task_categories": ["text-generation"],
        "tags": ["synthetic", "bass"],
        "size_categories": [_size(totals.get("samples"))],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": file}]}],
    }
    target = str(results.get("target", "a model"))
    rows = [f"| {key} | {_cell(value)} |" for key, value in _facts(results, totals)]
    licensed = (
        f"The licence of the model is `{licence}`; it may bind users of its outputs."
        if licence is not None
        else "The licence of the model is unknown to this card; it may bind users of its outputs."
    )
    text = f"""\
{MARK}

# {name.split("/")[1]}

**A model generated these texts.** No person wrote or checked them. They may be wrong, biased, or \
copied from the model's training data.

{totals.get("samples", "Some")} samples of `{target}`, drawn with bass {__version__}.

| | |
|---|---|
{chr(10).join(rows)}

`{file}` has a line for each sample, or for each prompt with its "samples": "id" and "sample", \
"text", "finish_reason" (eos, stop, length or budget), "mean_logprob", and the fields of the \
prompt in "meta". `{file}.manifest.json` has all settings, versions and totals.

## Load

```python
from datasets import load_dataset

samples = load_dataset("{name}", split="train")
```

## Licence

{licensed} The prompts have a licence of their own.
"""
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n{text}"


def _facts(results: Mapping[str, Any], totals: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of the table."""
    for key in _SETTINGS:
        if results.get(key) not in _EMPTY:
            yield key, results[key]
    prompts = results.get("prompts")
    if isinstance(prompts, dict) and isinstance(prompts.get("count"), int):
        yield "prompts", prompts["count"]
    for key in ("samples", "tokens", "finish_reasons"):
        if totals.get(key) not in _EMPTY:
            yield key.replace("_", " "), totals[key]


def _cell(value: Any) -> str:
    """Format a value for a cell of a table."""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "`" + shown.replace("|", "\\|").replace("`", "'").replace("\n", "\\n") + "`"


def _size(samples: Any) -> str:
    count = samples if isinstance(samples, int) else 0
    return next((word for most, word in _SIZES if count < most), _LARGEST)
