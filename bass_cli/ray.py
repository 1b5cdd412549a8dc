"""Map a Ray Data dataset of prompts to a dataset of samples.

This is a thin layer over the library; Ray decides the order and handles faults. `bass generate
--ray` (cluster/) writes a file that survives kills, and shows the progress of each actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.reading import shown

if TYPE_CHECKING:
    from ray.data import Dataset

# Prompts of one batch of Ray Data. Rows run empty at the end of each batch, so a batch should have
# many times as many samples as there are rows.
BATCH = 256


def generate(dataset: Dataset, job: Job, *, actors: int = 1, batch_size: int = BATCH) -> Dataset:
    """Make a dataset with one row for each sample, with the fields of a result line.

    Samples are drawn when the dataset is consumed.

    Args:
        dataset: Rows with the fields of a prompt line: {"id", "prompt"}, or the job's
            prompt_column. Other columns come back as a JSON object in `meta`. Every row needs an
            id of its own, because the seed and the id fix its samples.
        job: The job.
        actors: Processes with the models. Each has a GPU, or CPUs if there are no GPUs.
        batch_size: Prompts that an actor gets at once.

    Raises:
        UserError: The samples of the job would depend on how prompts are batched.
    """
    if not isinstance(job, Job):
        raise UserError(f"bass_cli.ray.generate: a Job is needed, not {shown(job)}")
    for name, value in (("actors", actors), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"bass_cli.ray.generate: {name} must be at least 1, not {shown(value)}")
    if job.speculation.coupling == "maximal" or job.budget is not None:
        raise UserError(
            "bass_cli.ray.generate: with maximal coupling or a budget samples depend on the other "
            "samples in the batch, which Ray Data chooses; use neither"
        )
    if job.tensor_parallel > 1:
        raise UserError("bass_cli.ray.generate: an actor has one GPU; leave tensor_parallel out")
    if job.limit is not None:
        dataset = dataset.limit(job.limit)
    gpus = _on_gpus(job)
    return dataset.map_batches(
        Drawer,
        fn_constructor_args=(job,),
        batch_format="pyarrow",
        batch_size=batch_size,
        concurrency=actors,
        num_gpus=1 if gpus else None,
        num_cpus=None if gpus else job.threads or 1,
    )


def _on_gpus(job: Job) -> bool:
    """Whether each actor takes a GPU: for device "auto", whether the cluster has GPUs."""
    if job.device != "auto":
        return job.device == "cuda"
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


# The fields of a result line, with their types
_COLUMNS = {
    **dict.fromkeys(("id", "text", "finish_reason", "meta", "error", "reasoning"), "text"),
    **dict.fromkeys(("prompt", "messages"), "text"),  # messages: JSON
    **dict.fromkeys(("sample", "tokens", "rounds", "drafted", "accepted", "seed"), "int"),
    **dict.fromkeys(("prompt_tokens", "copy_of", "reasoning_tokens"), "int"),
    **dict.fromkeys(("mean_logprob", "sum_logprob", "seconds"), "float"),
    "token_ids": "ints",
    "token_logprobs": "floats",
    "top_logprobs": "pairs",
    "token_drafted": "ints",
    "prompt_token_ids": "ints",
    "prompt_logprobs": "floats",
    "prompt_top_logprobs": "pairs",
}


class Drawer:
    """An actor: it loads the job's models when it is created."""

    def __init__(self, job: Job):
        from bass_cli.run.engine import Engine

        self._engine = Engine(job)

    def __call__(self, batch: Any) -> Any:
        """Return the table of samples for a table of prompts."""
        import json

        import pyarrow

        kinds = {"text": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float64()}
        kinds["ints"], kinds["floats"] = map(pyarrow.list_, (kinds["int"], kinds["float"]))
        pair = pyarrow.struct([("id", kinds["int"]), ("logprob", kinds["float"])])
        kinds["pairs"] = pyarrow.list_(pyarrow.list_(pair))
        rows = [_plain(row) for row in batch.to_pylist()]
        if not all("id" in row for row in rows):
            raise UserError(
                'bass_cli.ray.generate: a row has no "id"; give every row its own id, because the '
                "seed and the id fix its samples"
            )
        drawn = self._engine.generate(rows)
        found = [json.loads(one.to_line()) for one in drawn]
        for row in found:
            for name in ("meta", "messages"):
                if name in row:
                    row[name] = json.dumps(row[name], ensure_ascii=False)
            for name in ("top_logprobs", "prompt_top_logprobs"):
                row[name] = _structs(row.get(name))
        schema = pyarrow.schema([(name, kinds[kind]) for name, kind in _COLUMNS.items()])
        return pyarrow.Table.from_pylist(found, schema=schema)


def _structs(places: list[Any] | None) -> list[Any] | None:
    """Return pairs of token id and log-probability as objects: pyarrow's lists have one type."""
    if places is None:
        return None
    return [place and [{"id": i, "logprob": x} for i, x in place] for place in places]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Remove the None values that Ray Data puts into missing columns."""
    return {key: value for key, value in row.items() if value is not None}
