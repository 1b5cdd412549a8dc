"""Choose the format of prompts by task and model, with a reason for the user.

An instruct model gets the task's question through its chat template, because it was trained on
chats. A base model gets the raw prompt. A file is always continued in its own format.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from bass_cli.config.job import Job
from bass_cli.errors import UserError, nearest
from bass_cli.eval.tasks.task import PromptFormat, Task
from bass_cli.io.linefile import stem_of
from bass_cli.io.resume import manifest_path, read_manifest

AUTO = "auto"
_FORMATS: tuple[str, ...] = get_args(PromptFormat)
# Words of a conversation by which the text between two of its turns is found
_QUESTION, _ANSWER, _NEXT = "What is one and one?", "It is two.", "And one more?"


class Choice(NamedTuple):
    """A format, the reason for the user, and the reason for the manifest.

    Both reasons are None if the user or the task names the format.
    """

    form: PromptFormat
    reason: str | None
    recorded: str | None


def read_format(given: str | None, task: Task) -> str:
    """Return the format that the user or the task names: "auto" or a PromptFormat.

    UserError if there is none of that name, or the task has no text for it.
    """
    name = task.prompt_format if given is None else given
    known = (AUTO, *_FORMATS)
    if name not in known:
        raise UserError(f'`prompt_format`: there is no "{name}"; {nearest(name, known)}')
    if name == "chat" and not task.has_question:
        raise UserError(f"`prompt_format` chat: {task.name} has no question for chats; use raw")
    if name not in (AUTO, "chat") and not task.has_prompt:
        raise UserError(f"`prompt_format` {name}: {task.name} has no raw prompt; use chat")
    return name


def of_earlier_file(outs: Iterable[str]) -> Choice | None:
    """Return the format in which one of these files, or of the files of its sweep, was begun.

    None if there is no such file, or its manifest does not say.
    """
    for out in outs:
        stem = stem_of(out)
        swept = glob.glob(f"{glob.escape(stem)}.*-*s{out[len(stem) :]}.manifest.json")
        for manifest in (str(manifest_path(out)), *sorted(swept)):
            file = manifest.removesuffix(".manifest.json")
            try:
                found = read_manifest(file)
                form = found["results"]["prompt_format"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if form in _FORMATS and Path(file).exists():
                earlier = found.get("prompt_format_reason")
                return Choice(cast(PromptFormat, form), f"{file} was begun in it", earlier)
    return None


def for_model(task: Task, job: Job) -> Choice:
    """Choose between chat and raw by the task and the job's target.

    UserError if the target's files cannot be read.
    """
    if not task.has_question:
        is_chat, reason = False, f"{task.name} has no question for chats"
    elif not task.has_prompt:
        is_chat, reason = True, f"{task.name} has a question for chats only"
    else:
        is_chat, reason = _answers_chats(job)
    return Choice("chat" if is_chat else "raw", reason, reason)


def _answers_chats(job: Job) -> tuple[bool, str]:
    """Return whether the target is an instruct model, and why.

    It is one if its chat template ends an answer with a token that also ends its samples. Some
    base models have a chat template too, but their samples end with another token.
    """
    from bass_cli.formats.checkpoint import open_checkpoint
    from bass_cli.formats.sources import locate
    from bass_cli.formats.tokenizer import Tokenizer

    pair = job.pair
    path = locate(pair.target, folder=pair.folder, weights=True)
    checkpoint = open_checkpoint(path, decoder=pair.decoder)
    if pair.tokenizer:
        tokenizer = Tokenizer.load(locate(pair.tokenizer, folder=pair.folder))
    else:
        tokenizer = Tokenizer.load(path, vocabulary=checkpoint.vocabulary)
    if job.template is not None:
        tokenizer = tokenizer.with_template(job.template)
    if not tokenizer.has_chat_template:
        return False, f"{pair.target} has no chat template"
    words = (("user", _QUESTION), ("assistant", _ANSWER), ("user", _NEXT))
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in words]
    try:
        text = tokenizer.render(messages, tools=job.tools, args=job.template_args)
    except UserError as error:
        return False, f"{pair.target}: {error}"
    between = text.partition(_ANSWER)[2].partition(_NEXT)[0]
    ids = checkpoint.eos_ids or tokenizer.eos_ids
    ends = [one for one in map(tokenizer.spelled, ids) if one and one in between]
    if not ends:
        return False, (
            f"{pair.target} is no instruct model: its chat template ends answers with a token that "
            "does not end its samples"
        )
    return True, f"{pair.target} is an instruct model: its chat template ends answers by {ends[0]}"
