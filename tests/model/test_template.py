"""Chat templates are programs. One that loops or fills the memory fails its prompt only."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from checkpoints import write_tokenizer

from bass_cli.errors import UserError
from bass_cli.formats import chat_template
from bass_cli.formats import tokenizer as tokenizer_module
from bass_cli.formats.limits import Limited
from bass_cli.formats.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "the cat"}]
HELLO = [{"role": "user", "content": "hello"}]
pytestmark = [
    pytest.mark.usefixtures("children"),
    pytest.mark.skipif(
        sys.platform != "linux", reason="elsewhere templates are rendered in the process itself"
    ),
]
# Each misbehaves for "the cat" only: a Python loop, a call in C that never returns, memory in one
# allocation, and memory in small steps.
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = (NESTED, "{{ (7 ** (9 ** (8 + messages|length))) % 3 }}")
DOUBLED = (
    "{% set a = namespace(b='x') %}{% for i in range(60) %}{% set a.b = a.b + a.b %}{% "
    "endfor %}{{ a.b }}"
)
LARGE = ("{{ 'x' * 10 ** 11 }}", DOUBLED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(place)
    return place


def with_template(folder: Path, body: str) -> Tokenizer:
    whole = f"{{% if messages[0].content == 'the cat' %}}{body}{{% endif %}}fine"
    return Tokenizer(Tokenizer.load(folder).cached._replace(template=whole), folder)


@pytest.mark.parametrize("body", ENDLESS)
def test_a_template_that_loops_fails_its_prompt_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(tokenizer_module, "_TEMPLATE_SECONDS", 0.3)
    tokenizer = with_template(folder, body)
    working, over = [0], threading.Event()
    threading.Thread(
        target=lambda: [working.append(1) for _ in iter(lambda: over.wait(0.01), True)], daemon=True
    ).start()
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"the chat template refuses the messages: it takes more than 0\.3 s"
        ):
            tokenizer.encode_chat(MESSAGES)
        assert tokenizer.decode(tokenizer.encode_chat(HELLO)) == "fine"
    over.set()
    assert len(working) > 10  # other threads ran at the same time


@pytest.mark.parametrize("body", LARGE)
def test_a_template_that_fills_the_memory_fails_its_prompt_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(tokenizer_module, "_TEMPLATE_MEMORY", 2**27)
    tokenizer = with_template(folder, body)
    with pytest.raises(UserError, match="it takes more than 128 MB of memory"):
        tokenizer.encode_chat(MESSAGES)
    assert tokenizer.decode(tokenizer.encode_chat(HELLO)) == "fine"


def test_messages_that_do_not_fit_the_memory_are_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_TEMPLATE_MEMORY", 2**26)
    tokenizer = with_template(folder, "")
    with pytest.raises(UserError, match="it takes more than 64 MB of memory"):
        tokenizer.encode_chat([{"role": "user", "content": "x" * 10**8}])
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode_part("fine")


def test_a_template_with_too_long_a_result_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "LARGEST", 1000)
    with pytest.raises(UserError, match="its text has 5004 characters"):
        with_template(folder, "{{ 'x' * 5000 }}").encode_chat(MESSAGES)


def test_the_process_of_a_template_closes_files_and_ends_with_its_parent(tmp_path: Path) -> None:
    read, write = os.pipe()

    def see(_: object) -> bytes:
        streams = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (0, 1, 2)]
        interrupted = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        return " ".join(
            [*streams, str(len(os.listdir("/proc/self/fd"))), str(os.getpid()), str(interrupted)]
        ).encode()

    render = Limited(see, seconds=10, memory=1 << 30)
    *streams, files, pid, ignores = render([]).decode().split()
    assert (set(streams), files, ignores) == (
        {os.devnull},
        "5",
        "True",
    )  # and its pipe, and the descriptor that lists the folder
    os.close(write)
    assert os.read(read, 1) == b""  # no process has the other end open
    os.close(read)
    os.kill(int(pid), 0)
    del render
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_errors_of_a_template_are_reported_and_private_attributes_refused(folder: Path) -> None:
    asked = with_template(folder, "{{ raise_exception('no cats') }}")
    with pytest.raises(UserError, match="the chat template refuses the messages: no cats"):
        asked.encode_chat(MESSAGES)
    hidden = with_template(folder, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match=r"the chat template refuses the messages: .*unsafe"):
        hidden.encode_chat(MESSAGES)


def test_after_an_interruption_the_next_call_gets_its_own_answer(folder: Path) -> None:
    tokenizer = with_template(folder, ENDLESS[0])
    # Starts the process. Python ignores what a signal's handler raises in a hook of a fork, and
    # on a busy machine a fork takes as long as the timer.
    assert tokenizer.decode(tokenizer.encode_chat(HELLO)) == "fine"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode_chat(MESSAGES)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert tokenizer.decode(tokenizer.encode_chat(HELLO)) == "fine"
