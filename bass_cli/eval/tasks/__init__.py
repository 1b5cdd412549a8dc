"""The tasks of `bass eval`, by name.

task.py has the base class `Task`. A new task is a file with a subclass, and an entry in TASKS.
rank/code.py finds the code in an answer and the names that tests take from a program.
"""

from __future__ import annotations

from bass_cli.errors import UserError, nearest
from bass_cli.eval.tasks.humaneval import HumanEval
from bass_cli.eval.tasks.mbpp import Mbpp
from bass_cli.eval.tasks.task import Task
from bass_cli.eval.tasks.xsum import Xsum

TASKS: dict[str, type[Task]] = {task.name: task for task in (HumanEval, Mbpp, Xsum)}


def load_task(name: str, data: str | None = None) -> Task:
    """Load a task and its problems.

    Args:
        name: a key of TASKS.
        data: a file, or hf:NAME[:CONFIG][:SPLIT]. Default: the task's own data set.

    Raises:
        UserError: the name is unknown, or the data is invalid.
    """
    if name not in TASKS:
        raise UserError(f'there is no task "{name}"; {nearest(name, TASKS)}')
    return TASKS[name](data)
