"""Run `bass distill`: draw samples, train, and write the draft, a pair file and a report.

Each step saves its results in the folder and is skipped if they exist, so an interrupted run
resumes. Samples and training are made in this process, or by actors on Ray; the files and the
settings that they depend on are the same for both.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from bass_cli.cluster.fleet import Cluster
from bass_cli.cluster.rays import cluster_of, read_request, workers_of
from bass_cli.cluster.worker import JobSpec
from bass_cli.config.job import Job, Pair
from bass_cli.config.machine_commands import DistillArgs
from bass_cli.config.options import ModelOptions
from bass_cli.distill.folder import config_of
from bass_cli.distill.group import Group, Rank, TrainingSpec
from bass_cli.distill.network import Source
from bass_cli.distill.sampling import Supply, draw, is_complete, own_beginnings, usable
from bass_cli.distill.settings import (
    check_disk,
    check_memory,
    find_source,
    once,
    requested_tokens,
    sampling_job,
    training_of,
    wanted_tokens,
    with_floats,
)
from bass_cli.distill.training import SECONDS, Places, TrainingRun
from bass_cli.distill.windows import FEWEST
from bass_cli.engine.clock import expected
from bass_cli.errors import UserError
from bass_cli.formats.lora import parse_adapter
from bass_cli.formats.sources import locate
from bass_cli.generation import files_read
from bass_cli.io.console import Screen
from bass_cli.io.prompts import Prompt, open_prompts, read_prompts
from bass_cli.io.results import Completion
from bass_cli.io.saving import refuse_shared_files, remove_drafts, write_file, write_json
from bass_cli.reading import parse_object, read_bytes
from bass_cli.run.generate import generate
from bass_cli.run.manifest import describe
from bass_cli.run.plan import make_plan, plan_of_others
from bass_cli.system.host import give_back_memory
from bass_cli.system.threads import configure_threads

_MOST_BYTES = 1 << 24  # largest settings file that is read


def run(args: DistillArgs, screen: Screen) -> dict[str, Any]:
    """Do all steps that are not done yet; print the table and return the report."""
    assert args.out is not None
    pair, job = sampling_job(args, requested_tokens(args, training_of(args)))
    request = read_request(args, job, str(Places.of(Path(args.out)).samples))
    with contextlib.ExitStack() as stack:
        cluster = None
        if request is not None:
            cluster = stack.enter_context(cluster_of(request, job, screen))
        document = _Distillation(args, pair, job, cluster, screen).run()
    screen.table(*table(document))
    return document


class _Distillation:
    """The steps of a distillation.

    Args:
        pair: the target, and the draft that the new one may start from.
        job: draws the samples.
        cluster: where it is, if actors draw and train; this process then loads no weights.
    """

    def __init__(
        self, args: DistillArgs, pair: Pair, job: Job, cluster: Cluster | None, screen: Screen
    ):
        assert args.out is not None
        self._args, self._pair, self._cluster, self._screen = args, pair, cluster, screen
        self._training, self._places = training_of(args), Places.of(Path(args.out))
        if cluster is None:
            configure_threads(job.threads, screen.note)
        screen.phase("checking the models", live=False)  # the hub's client shows what it fetches
        self._job = with_floats(job if cluster is None else cluster.job)
        self._plan = make_plan(self._job) if cluster is None else plan_of_others(self._job)

    def run(self) -> dict[str, Any]:
        """Fill the folder; return the report."""
        plan, places, screen = self._plan, self._places, self._screen
        source = find_source(self._args, self._pair, plan)
        # fails early if the draft's config.json cannot be written
        path, eos_ids = source.checkpoint.path, source.checkpoint.eos_ids
        config_of(source.spec, eos_ids=eos_ids, place=str(path))
        prompts, results = self._prompts()
        self._refuse_overwriting(path)
        if self._begin(source, results) and places.report.exists():
            places.checkpoint.unlink(missing_ok=True)
            screen.note(f"{places.folder}: this distillation is complete")
            found: dict[str, Any] = json.loads(places.report.read_text())
            return found
        check_disk(source, places.folder, results["tokens"])
        if self._cluster is None:  # each actor checks its own device
            check_memory(plan, source, self._training)
        for note in plan.notes:
            screen.note(note)
        if not is_complete(places.samples, results):
            likely, passes = expected(plan.job.sampling.max_new_tokens), results.get("passes")
            wanted = results["tokens"]
            self._draw(
                Supply(prompts, n=plan.job.n, wanted=wanted, likely=likely, passes=passes), results
            )
        document = self._train(source)
        _write_pair(places, self._pair, self._training.draft_length)
        write_json(places.report, document, f"{places.report}: cannot write the report")
        places.checkpoint.unlink(missing_ok=True)
        screen.note(
            f"the draft is in {places.draft}; try: bass generate PROMPTS `pair` {places.pair}"
        )
        return document

    def _prompts(self) -> tuple[Any, dict[str, Any]]:
        """Return the prompts for the target, and the settings that its samples depend on."""
        args, plan = self._args, self._plan
        prompts: list[Prompt] = []
        if args.prompts is None and args.prompt_column is not None:
            raise UserError("`prompt_column`: this option needs `prompts` FILE")
        if args.prompts is None:
            source: Any = own_beginnings(plan.files.tokenizer, args.chat)
            digest: dict[str, Any] = {"prompts": list(source)}
        else:
            file, column = open_prompts(args.prompts, args.prompt_column), plan.job.prompt_column
            every = read_prompts(file, column=column, limit=plan.job.limit)
            prompts = usable(every, plan, self._screen)
            if len({prompt.id for prompt in prompts}) < FEWEST:
                raise UserError(
                    f"`prompts` {args.prompts}: at least {FEWEST} usable prompts are needed, "
                    f"because one is held out to measure the draft (got {len(prompts)}); add "
                    "prompts"
                )
            source = functools.partial(iter, prompts)
            digest = {"prompts": file.digest() or file.name, "prompt_column": column}
        requested = requested_tokens(args, self._training)
        found = describe(plan, digest)["results"]
        found["tokens"] = wanted_tokens(args, plan, requested, len(prompts))
        if once(args):
            found["passes"] = 1
        return source, _as_json(found)

    def _refuse_overwriting(self, source: Path) -> None:
        """Refuse a folder in which a file that is read would be replaced.

        source: path of the model that the draft starts from.
        """
        args, places = self._args, self._places
        job = self._plan.job.model_copy(update={"pair": self._pair})
        read = [*files_read(args.pair, job), ("the model that the draft starts from", source)]
        if args.prompts is not None:
            read.append(("`prompts`", args.prompts))
        written = (places.pair, places.report, places.settings, places.checkpoint, places.samples)
        refuse_shared_files([("`out`", one) for one in written], read)
        draft = places.draft.resolve()  # a folder, which is emptied
        for what, path in read:
            place = Path(path).expanduser().resolve()
            if draft in (place, *place.parents):
                raise UserError(
                    f"`out` {places.folder}: {path} is {what} and would be lost; give another "
                    "folder"
                )

    def _begin(self, source: Source, results: dict[str, Any]) -> bool:
        """Prepare the folder and save the settings there.

        Returns: whether the folder was begun by the same command. UserError if by another one.
        """
        places, overwrite = self._places, self._args.overwrite
        settings = _as_json(
            {
                "samples": results,
                "source": source.checkpoint.fingerprint(),
                "layers": source.layers,
                "mask": source.mask,
                **asdict(self._training),
            }
        )
        folder = places.folder
        if folder.exists() and not folder.is_dir():
            raise UserError(f"`out` {folder}: this is a file; give a folder")
        before: dict[str, Any] | None = None
        if places.settings.exists():
            try:
                before = parse_object(read_bytes(places.settings, _MOST_BYTES))
            except (OSError, ValueError) as error:
                if not overwrite:
                    raise UserError(f"{places.settings}: {error}; use `overwrite`") from None
        elif folder.exists():  # a folder of other files is never emptied
            remove_drafts(places.settings)  # left by a kill while the settings were written
            names = [one.name for one in folder.iterdir()]
            others = [name for name in names if not name.startswith("samples.jsonl")]
            if others:
                raise UserError(
                    f"`out` {folder}: the folder holds other files ({others[0]}); give a new or "
                    "empty folder"
                )
        if before == settings and not overwrite:
            return True
        if before is not None and not overwrite:
            keys = {**before, **settings}
            changed = [key for key in keys if before.get(key) != settings.get(key)]
            raise UserError(
                f"`out` {folder}: this run was begun with other settings ({', '.join(changed)}); "
                "use `overwrite` to start again, or give another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for path in (places.checkpoint, places.report, places.pair):
            path.unlink(missing_ok=True)
        shutil.rmtree(places.draft, ignore_errors=True)
        if overwrite:
            for path in folder.glob("samples.jsonl*"):
                path.unlink()
        write_json(places.settings, settings, f"{places.settings}: cannot write the settings")
        return False

    def _draw(self, supply: Supply, results: dict[str, Any]) -> None:
        """Draw the samples that are missing. `results`: the settings that they depend on."""
        plan, screen = self._plan, self._screen
        save = functools.partial(
            draw, supply=supply, path=self._places.samples, results=results, screen=screen
        )
        if self._cluster is None:

            def local(supply: Supply, on_tokens: Callable[[int], None]) -> Iterator[Completion]:
                return generate(
                    supply,
                    plan,
                    done=supply.done,
                    on_round=lambda done: on_tokens(len(done.accepted) + sum(done.accepted)),
                    on_phase=screen.phase,
                    on_bytes=screen.bytes_read,
                    on_note=screen.note,
                )

            save(local)
            give_back_memory(plan.device)
            return
        source = {name: results[name] for name in results if name in ("prompts", "prompt_column")}
        with workers_of(self._cluster, screen, JobSpec(plan.job, source)) as workers:
            for note in workers.facts.notes:
                screen.note(note)
            found = _as_json(workers.facts.manifest["results"])
            differing = [key for key, value in found.items() if results.get(key) != value]
            if differing:
                key = differing[0]
                raise UserError(
                    f"the actors would draw other samples ({key}: {found[key]!r} there, "
                    f"{results.get(key)!r} here); install the same models and versions on all nodes"
                )
            save(lambda supply, _: workers.draw(supply, supply.done, None), line=workers.line)

    def _train(self, source: Source) -> dict[str, Any]:
        """Train on the samples and write the draft's folder; return the report."""
        places, screen = self._places, self._screen
        if self._cluster is None:
            training = TrainingRun(
                self._plan, source, self._training, places, screen, every=SECONDS
            )
            document = training.run()
            training.write()
            return document
        spec = TrainingSpec(
            replace(self._args, out=os.path.abspath(places.folder)),
            self._pair,
            self._job,
            os.getcwd(),
            places.samples.stat().st_size,
            SECONDS,
        )
        with self._cluster.fleet(Rank, spec) as fleet:
            return Group(fleet, screen, places.checkpoint).run()


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content as it is when it is read back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return found


# Settings of a target and its prompts, besides adapters, that a pair with a new draft keeps
_KEPT = {one.name for one in fields(ModelOptions)} - {"lora"} | {"kv_dtype"}


def _write_pair(places: Places, pair: Pair, draft_length: int) -> None:
    """Write the pair file of the target and its new draft.

    Relative paths of the old pair file become absolute. Its other settings of the target and of
    prompts are kept. draft_length: the longest that was trained.
    """

    def absolute(source: str) -> str:
        places = [Path(source).expanduser()]
        if pair.folder is not None:
            places.append(pair.folder / source)
        here = any(place.exists() for place in places)
        return str(locate(source, folder=pair.folder)) if here else source

    words: dict[str, Any] = {"target": absolute(pair.target), "draft": "parallel:./draft"}
    if pair.tokenizer is not None:
        words["tokenizer"] = absolute(pair.tokenizer)
    if pair.lora:
        words["lora"] = [
            absolute(source) + text.removeprefix(source)
            for text in pair.lora
            for source, _ in [parse_adapter(text)]
        ]
    words |= pair.model_dump(mode="json", include=_KEPT, exclude_defaults=True)
    words["speculation"] = {"max": draft_length}
    sampling = pair.sampling.model_dump(mode="json", exclude_unset=True)
    if sampling:
        words["sampling"] = sampling
    if pair.dtype != "auto":
        words["dtype"] = pair.dtype
    write_file(places.pair, yaml.safe_dump(words, sort_keys=False).encode())


def table(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Make the table: accepted drafts of a block, and acceptance by position (shared coupling).

    The acceptance of a position counts drafts whose predecessors were all accepted.
    """
    found = {
        f"{moment} {name}": rates
        for moment in ("before", "after")
        for name, rates in document[moment].items()
    }
    longest = max(len(rates["shared"]) for rates in found.values())
    columns = ["accepted drafts", "in all", *(str(place) for place in range(1, longest + 1))]
    lines = [
        [
            name,
            "-" if rates["kept"] is None else f"{rates['kept']:.2f}",
            *(f"{share:.3f}" for share in rates["shared"]),
        ]
        for name, rates in found.items()
    ]
    return columns, lines
