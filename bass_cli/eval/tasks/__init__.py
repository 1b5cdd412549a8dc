"""The tasks of `bass eval`, by name.

A task is a YAML file (own.py), or a subclass of `Task` (task.py) with an entry in TASKS.
rank/code.py finds the code in an answer and the names that tests take from a program.
"""

from __future__ import annotations

import importlib.resources

from bass_cli.errors import UserError, nearest
from bass_cli.eval.tasks.ifeval import IfEval
from bass_cli.eval.tasks.programming import HumanEval, HumanEvalPlus, Mbpp, MbppPlus
from bass_cli.eval.tasks.task import Task
from bass_cli.eval.tasks.xsum import Xsum

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (HumanEval, HumanEvalPlus, Mbpp, MbppPlus, IfEval, Xsum)
}
# other names of tasks, for shells and file names
ALIASES = {"humaneval-plus": "humaneval+", "mbpp-plus": "mbpp+"}


def packaged_tasks() -> list[str]:
    """Return the names of the task files that bass has."""
    files = importlib.resources.files("bass_cli.eval.tasks").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def task_names() -> list[str]:
    """Return the names of the tasks that bass has."""
    return [*TASKS, *packaged_tasks()]


def load_task(name: str, data: str | None = None) -> Task:
    """Load a task and its problems.

    Args:
        name: one of `task_names`, a key of ALIASES, or a task file (.yaml).
        data: a file, or hf:NAME[:CONFIG][:SPLIT]. Default: the task's own data set.

    Raises:
        UserError: the name is unknown, or the file or the data is invalid.
    """
    name = ALIASES.get(name, name)
    if name in TASKS:
        return TASKS[name](data)
    from bass_cli.eval.tasks.own import OwnTask  # pydantic and the reader of YAML take a while
    from bass_cli.eval.tasks.task_file import SUFFIXES, read_packaged, read_task_file

    if name.endswith(SUFFIXES):
        loaded = read_task_file(name)
        if (own := loaded.options.name) in {*task_names(), *ALIASES}:
            raise UserError(
                f"{loaded.located.at('name')}: {own} is a task of bass, which `bass score` would "
                f"take for these samples; use another name, such as my-{own}"
            )
        return OwnTask(loaded, data)
    if name in packaged_tasks():
        return OwnTask(read_packaged(name), data)
    near = nearest(name, [*task_names(), *ALIASES])
    raise UserError(f'there is no task "{name}"; {near} (a task file ends in .yaml)')
