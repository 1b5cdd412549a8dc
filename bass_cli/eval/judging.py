"""Get verdicts on programs and answers. Each distinct program runs once, in the sandbox.

stores.py keeps the verdicts, and report.py computes figures from them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from bass_cli.errors import UserError
from bass_cli.eval.stores import Verdict, VerdictStore
from bass_cli.eval.tasks.task import Check
from bass_cli.reading import is_unicode
from bass_cli.sandbox.programs import Ending, Program, Sandbox

DETAIL = 300  # characters of a detail that are kept: enough for the last line of a traceback

Key = tuple[str, int]


def digest(program: Program, limits: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything that a verdict depends on: program and limits."""
    text = json.dumps(dict(limits), sort_keys=True, default=str) + "\n" + "\0".join(_texts(program))
    return content_digest(text)


def content_digest(content: str) -> str:
    """Return the SHA-256 of everything that a verdict depends on, as one text."""
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def _texts(program: Program) -> tuple[str, ...]:
    return (program.text, program.tests, program.setup, *program.names)


def judge(
    programs: Iterable[tuple[Key, Program]],
    store: VerdictStore,
    limits: Mapping[str, Any],
    *,
    tests: str = "",
    open_sandbox: Callable[[], Sandbox],
    progress: Callable[[int, int], None],
) -> dict[Key, Verdict]:
    """Return a verdict for each key.

    Args:
        programs: (key, program) pairs.
        store: verdicts that are known. Their programs are not run; new verdicts are added.
        limits: limits of each program.
        tests: see Verdict.
        open_sandbox: called only if programs are left to run.
        progress: called with the number of keys that have a verdict and the number of keys.

    Raises:
        UserError: the tests of a problem cannot be used.
    """
    waiting: dict[str, list[Key]] = {}
    texts: dict[str, Program] = {}
    digests: dict[Key, str] = {}
    for key, program in programs:
        name = digests[key] = digest(program, limits)
        if name in store.verdicts:
            store.add(store.verdicts[name]._replace(task_id=key[0], sample=key[1], tests=tests))
            continue
        waiting.setdefault(name, []).append(key)
        texts.setdefault(name, program)
    done, total = len(digests) - sum(map(len, waiting.values())), len(digests)
    progress(done, total)
    with contextlib.closing(_run(texts, open_sandbox)) as endings:
        for name, ending, isolation in endings:
            detail, seconds = ending.detail[-DETAIL:], round(ending.seconds, 3)
            if ending.status == "unusable":
                raise UserError(
                    f'problem "{waiting[name][0][0]}" of the task\'s data: the set-up of its tests '
                    f"failed: {detail}; correct that problem, or leave it out"
                )
            verdict = Verdict("", 0, name, ending.status, detail, seconds, isolation, tests)
            for task_id, sample in waiting[name]:
                store.add(verdict._replace(task_id=task_id, sample=sample))
            done += len(waiting[name])
            progress(done, total)
    return {key: store.verdicts[name] for key, name in digests.items()}


def check_answers(
    cases: Iterable[tuple[Key, str, Callable[[], Check]]],
    store: VerdictStore,
    *,
    progress: Callable[[int, int], None],
    total: int,
) -> dict[Key, Verdict]:
    """Return a verdict for each key, of answers that are compared without a program.

    Args:
        cases: for each key, everything that the check depends on, and the check.
        store: verdicts that are known. Their checks are not run; new verdicts are added.
        progress: called with the number of cases that have a verdict and the number of cases.
        total: the number of cases.
    """
    found: dict[Key, Verdict] = {}
    for (task_id, sample), content, check in cases:
        name = content_digest(content)
        verdict = store.verdicts.get(name)
        if verdict is None:
            status, detail = check()
            verdict = Verdict(task_id, sample, name, status, detail[-DETAIL:], 0.0, {})
        found[task_id, sample] = verdict._replace(task_id=task_id, sample=sample)
        store.add(found[task_id, sample])
        progress(len(found), total)
    return found


def _run(
    texts: Mapping[str, Program], open_sandbox: Callable[[], Sandbox]
) -> Generator[tuple[str, Ending, dict[str, str]], None, None]:
    """Yield endings as programs finish. Closing this iterator kills the running programs.

    A text with a lone surrogate cannot be written to a file, so it fails without being run.
    """
    runnable = {name: text for name, text in texts.items() if all(map(is_unicode, _texts(text)))}
    for name in (one for one in texts if one not in runnable):
        yield name, Ending("failed", "the program is not valid Unicode", 0.0), {}
    if runnable:
        with (
            open_sandbox() as sandbox,
            contextlib.closing(sandbox.run(runnable.items())) as endings,
        ):
            for name, ending in endings:
                yield name, ending, sandbox.isolation._asdict()


def isolation_of(verdicts: Iterable[Verdict]) -> dict[str, str] | None:
    """Return how the programs were isolated. Differing verdicts are joined by "or"."""
    words: dict[str, set[str]] = {}
    for verdict in verdicts:
        for key, word in verdict.isolation.items():
            words.setdefault(key, set()).add(word)
    return {key: " or ".join(sorted(found)) for key, found in words.items()} or None
