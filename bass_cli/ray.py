"""For people who live in Ray Data: a dataset of prompts to a dataset of samples.

A thin map over the library, in Ray's own order and with Ray's own ways to go on after a fault. For
a file that outlives kills and a display of who draws what: `bass generate --ray` (cluster/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bass_cli.config.job import Job
from bass_cli.errors import UserError
from bass_cli.io.reading import shown
from bass_cli.run.generate import generate as draw
from bass_cli.run.generate import own_terms, told_in_own_terms

if TYPE_CHECKING:
    from ray.data import Dataset

# Prompts that an actor is given at once: its rows empty towards the end of each such batch, so they
# are to be many times as many as its rows have room for.
BATCH = 256


def generate(dataset: Dataset, job: Job, *, actors: int = 1, batch_size: int = BATCH) -> Dataset:
    """A dataset with one row for every sample of every row of `dataset`, with the fields of a
    result line; not drawn before it is consumed, like all of Ray Data.

    A row is like a prompt line: {"id", "prompt"} (or the job's prompt_column), other columns come
    back as JSON objects in `meta`. Each has an id of its own, since the seed and the id fix the
    samples, and which number a row has in the dataset nobody here knows: one without ends the
    run. `actors`: processes with the models, each on a GPU of its own, or on CPUs where there are
    none. `batch_size`: prompts that one is given at once. UserError for a job of a kind whose
    samples would depend on how prompts are batched."""
    if not isinstance(job, Job):
        raise UserError(f"bass_cli.ray.generate: a Job is needed, not {shown(job)}")
    for name, value in (("actors", actors), ("batch_size", batch_size)):
        if not isinstance(value, int) or value < 1:
            raise UserError(
                f"bass_cli.ray.generate: {name} is a number from 1 on, not {shown(value)}"
            )
    if job.speculation.coupling == "maximal" or job.budget is not None:
        raise UserError(
            "bass_cli.ray.generate: maximal coupling and budgets make samples depend on what is "
            "drawn beside them, which Ray Data decides; leave both out"
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
    """Whether its actors take a GPU each: with device "auto" where the cluster has any."""
    if job.device != "auto":
        return job.device == "cuda"
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


# A result line's fields, each of one type in all batches.
_COLUMNS = {
    **dict.fromkeys(("id", "text", "finish_reason", "meta", "error"), "text"),
    **dict.fromkeys(("sample", "tokens", "rounds", "drafted", "accepted", "seed"), "int"),
    **dict.fromkeys(("prompt_tokens", "copy_of"), "int"),
    **dict.fromkeys(("mean_logprob", "sum_logprob", "seconds"), "float"),
    "token_ids": "ints",
}


class Drawer:
    """One process with the job's models, which are loaded when it begins."""

    def __init__(self, job: Job):
        from bass_cli.run.build import build
        from bass_cli.run.plan import make_plan
        from bass_cli.system.threads import configure_threads

        with own_terms():
            configure_threads(job.threads, lambda note: None)
            self._plan = make_plan(job)
        self._loop = build(self._plan)

    def __call__(self, batch: Any) -> Any:
        """A table of prompts to the table of their samples."""
        import json

        import pyarrow

        kinds = {"text": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float64()}
        kinds["ints"] = pyarrow.list_(kinds["int"])
        rows = [_plain(row) for row in batch.to_pylist()]
        if not all("id" in row for row in rows):
            raise UserError(
                'bass_cli.ray.generate: a row has no "id"; give each one of its own, which says '
                "with the seed what its samples are"
            )
        drawn = told_in_own_terms(draw(rows, self._plan, loop=self._loop))
        found = [json.loads(one.to_line()) for one in drawn]
        for row in found:
            row["meta"] = json.dumps(row["meta"], ensure_ascii=False)
        schema = pyarrow.schema([(name, kinds[kind]) for name, kind in _COLUMNS.items()])
        return pyarrow.Table.from_pylist(found, schema=schema)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Without what Ray Data has for a column that a row lacks."""
    return {key: value for key, value in row.items() if value is not None}
