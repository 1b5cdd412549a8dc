"""Tokenizers: text to ids and back, chat templates, the check of vocabularies, the cache."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import tokenizer_metadata, write_gguf, write_sentencepiece, write_tokenizer
from forked import run_forked
from tokenizers import Tokenizer as Backend

from bass_cli.errors import UserError
from bass_cli.formats import tokenizer as tokenizer_module
from bass_cli.formats.tokenizer import Tokenizer, check_same_vocabulary

TEXT = "the cat sat 🙂 – naïve,\n\n  x == 12;"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


def test_decoding_encoded_text_gives_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([1, *ids, 2, 0]) == TEXT  # special tokens are left out
    assert tokenizer.decode(tokenizer.encode("no , clean - up .")) == "no , clean - up ."
    assert (tokenizer.eos_ids, tokenizer.size) == ((2,), 299)
    assert max(ids) < tokenizer.size


def test_prompts_get_the_usual_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    plain = Tokenizer.load(tmp_path).encode("the cat")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the cat") == [1, *plain]
    chat = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert chat.count(1) == 1
    assert chat[0] == 1


def test_chat_template_renders_and_refuses_messages(tokenizer: Tokenizer) -> None:
    assert tokenizer.has_chat_template
    messages = [{"role": "system", "content": "the mat"}, {"role": "user", "content": "the cat"}]
    ids = tokenizer.encode_chat(messages)
    assert tokenizer.decode(ids) == "[system] the mat[user] the cat[assistant]"
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 2)
    with pytest.raises(UserError, match="the chat template refuses the messages: no"):
        tokenizer.encode_chat([{"role": "bad", "content": ""}])


def test_chat_without_template_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=False)
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="has no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "the cat"}])


def test_missing_and_broken_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer can be read there") as error:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(error.value)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no tokenizer can be read there"):
        Tokenizer.load(tmp_path)


CODE = ["own.Own", "own.OwnFast"]
# tokenizer_config, config, message
FOLDERS_WITH_CODE: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    ("a map", {"auto_map": {"AutoTokenizer": CODE}}, {}, 'tokenizer_config.json: key "auto_map": '
                                                         '.*own.Own'),
    ("of old", {"auto_map": ["own.Own", None], "tokenizer_class": "Own"}, {}, 'tokenizer_config.json: key "auto_map"'),
    ("in the other file", {}, {"auto_map": {"AutoTokenizer": CODE}}, '/config.json: key '
                                                                     '"auto_map": .*own.Own'),
    ("unknown", {"tokenizer_class": "Own"}, {}, 'tokenizer_config.json: key "tokenizer_class": '
                                                '.*no tokenizer class .Own'),
    ("unknown there", {}, {"tokenizer_class": "Own"}, '/config.json: key "tokenizer_class": .*Own'),
    ("not a name", {"tokenizer_class": 3}, {}, 'tokenizer_config.json: key "tokenizer_class": .* '
                                               '3'),
    # A class of transformers that is not a tokenizer: it would run the model's code.
    ("a model", {"tokenizer_class": "AutoModelForCausalLM"},
     {"model_type": "own", "auto_map": {"AutoConfig": "own.Settings", "AutoModelForCausalLM": "own.Own"}},
     'tokenizer_config.json: key "tokenizer_class": .*AutoModelForCausalLM'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "model", "said"),
    [row[1:] for row in FOLDERS_WITH_CODE],
    ids=[row[0] for row in FOLDERS_WITH_CODE],
)
def test_code_of_a_model_is_never_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokens: dict[str, object],
    model: dict[str, object],
    said: str,
) -> None:
    """tokenizer.json needs no class; without it an unknown class is refused."""
    folder_with_code(tmp_path, tokens, model)
    answers = io.StringIO("y\n" * 10)
    monkeypatch.setattr("sys.stdin", answers)
    whole = Backend.from_file(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(TEXT) == whole.encode(TEXT).ids
    content = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, content["merges"])))
    with pytest.raises(UserError, match=said):
        Tokenizer.load(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert answers.tell() == 0


def test_model_code_beside_a_tokenizer_that_is_data_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with_code(
        tmp_path, {}, {"model_type": "own", "auto_map": {"AutoConfig": "own.Settings"}}
    )
    answers = io.StringIO("y\n" * 10)
    monkeypatch.setattr("sys.stdin", answers)
    assert Tokenizer.load(tmp_path).decode([2, 40]) != ""
    assert not (tmp_path / "ran").exists()
    assert answers.tell() == 0


def folder_with_code(folder: Path, tokens: dict[str, object], model: dict[str, object]) -> None:
    """Write a tokenizer with these keys in its two configurations, and code that writes "ran"."""
    write_tokenizer(folder)
    (folder / "own.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\nimport transformers\n"
        "class Own(transformers.PreTrainedTokenizerFast): pass\nclass OwnFast(Own): pass\n"
        "class Settings(transformers.GPT2Config): pass\n"
    )
    for name, more in (("tokenizer_config.json", tokens), ("config.json", model)):
        file = folder / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | more))


def edited(
    folder: Path, *, rename: dict[str, str] | None = None, extra: tuple[str, ...] = ()
) -> Tokenizer:
    """Return the tiny tokenizer with tokens renamed or added."""
    write_tokenizer(folder, extra=extra)
    content = json.loads((folder / "tokenizer.json").read_text())
    model = content["model"]
    model["vocab"] = {(rename or {}).get(text, text): id_ for text, id_ in model["vocab"].items()}
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def test_vocabularies_that_differ_in_unused_tokens_are_the_same(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    check_same_vocabulary(tokenizer, tokenizer)
    longer = edited(tmp_path / "a", extra=("<new>", "[PAD300]", "<unused7>"))
    other = edited(tmp_path / "b", extra=("<new>", "<other>"))
    assert longer.size == 302
    for one, two in ((tokenizer, longer), (longer, tokenizer), (longer, other), (other, longer)):
        check_same_vocabulary(one, two)


def test_different_vocabularies_are_refused_with_the_first_id(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    renamed = edited(tmp_path / "a", rename={tokenizer.texts[290]: "Ġx"})
    with pytest.raises(
        UserError, match=f"id 290 is '{tokenizer.texts[290]}' in .* and 'Ġx' in"
    ) as error:
        check_same_vocabulary(tokenizer, renamed)
    assert str(renamed.path) in str(error.value)
    one, two = (
        edited(tmp_path / "b", extra=("<x>", "<z>")),
        edited(tmp_path / "c", extra=("<y>", "<z>")),
    )
    with pytest.raises(UserError, match=r"id 299 is '<x>' in .* and '<y>' in"):
        check_same_vocabulary(one, two)
    # A placeholder below a real token is an ordinary token.
    inside = edited(tmp_path / "d", extra=("<unused0>", "<z>"))
    with pytest.raises(UserError, match=r"id 299 is '<x>' in .* and '<unused0>' in"):
        check_same_vocabulary(one, inside)


def test_fingerprint_changes_with_tokens_and_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert edited(tmp_path / "a").fingerprint() == tokenizer.fingerprint()
    assert edited(tmp_path / "b", extra=("<x>",)).fingerprint() != tokenizer.fingerprint()
    write_tokenizer(tmp_path / "c", template=False)
    assert Tokenizer.load(tmp_path / "c").fingerprint() != tokenizer.fingerprint()


# GGUF


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Use a new cache folder; return a list of the paths whose files were read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[Path] = []
    made = tokenizer_module.read_files

    def counted(path: Path, key: str) -> bytes:
        calls.append(path)
        return made(path, key)

    monkeypatch.setattr(tokenizer_module, "read_files", counted)
    return calls


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "bass" / "tokenizers").iterdir())


def write_gguf_with(
    tokenizer: Tokenizer, path: Path, *, pre: str = "gpt-2", pad_to: int = 305
) -> Path:
    path.parent.mkdir(exist_ok=True)
    metadata = tokenizer_metadata(tokenizer.path, pad_to=pad_to, pre=pre)
    write_gguf("llama", path, vocab_size=pad_to, metadata=metadata)
    return path


def test_control_tokens_of_a_gguf_file_have_no_text(tmp_path: Path) -> None:
    """For example the tokens for filling in the middle: a base model may generate them, and they
    are not part of the text."""
    write_tokenizer(tmp_path, extra=("<|fim|>", "<call>"))
    plain = Tokenizer.load(tmp_path)
    metadata = tokenizer_metadata(tmp_path)
    fim, call = plain.encode("<|fim|><call>")
    metadata["tokenizer.ggml.token_type"][call] = 4  # user-defined: it has text
    assert metadata["tokenizer.ggml.token_type"][fim] == 3
    write_gguf(
        "llama",
        tmp_path / "model.gguf",
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        metadata=metadata,
    )
    loaded = Tokenizer.load(tmp_path / "model.gguf")
    assert loaded.encode("<|fim|><call>") == [fim, call]
    assert loaded.decode([*plain.encode("the"), fim, call]) == "the<call>"


def test_gguf_tokenizer_is_converted_once(
    tokenizer: Tokenizer, tmp_path: Path, converted: list[Path]
) -> None:
    path = write_gguf_with(tokenizer, tmp_path / "model.gguf")
    first, second = Tokenizer.load(path), Tokenizer.load(path)
    assert converted == [path]
    for loaded in (first, second):
        assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
        assert loaded.decode(loaded.encode(TEXT)) == TEXT
        assert loaded.size == 299  # without [PAD299] to [PAD304]
        assert (loaded.eos_ids, loaded.has_chat_template) == ((2, 7), True)
        assert max(loaded.encode("the<|endoftext|>")) < 299
        check_same_vocabulary(loaded, tokenizer)
    assert first.fingerprint() == second.fingerprint()
    write_gguf_with(tokenizer, path, pad_to=310)  # another file under the same name
    Tokenizer.load(path)
    assert converted == [path, path]


def test_broken_and_unwritable_caches(
    tokenizer: Tokenizer, tmp_path: Path, converted: list[Path]
) -> None:
    path = write_gguf_with(tokenizer, tmp_path / "model.gguf")
    wanted = Tokenizer.load(path).encode(TEXT)
    (entry,) = kept(tmp_path)
    whole = entry.read_bytes()
    other = Tokenizer.load(write_gguf_with(tokenizer, tmp_path / "other.gguf", pad_to=310))
    (foreign,) = {*kept(tmp_path)} - {entry}
    assert other.cached.fingerprint != Tokenizer.load(path).cached.fingerprint
    for times, damaged in enumerate(
        (b"", b"{", whole[:-1], whole.replace(b'"the"', b'"teh"'), foreign.read_bytes()), 1
    ):
        entry.write_bytes(damaged)
        for _ in range(2):
            assert Tokenizer.load(path).encode(TEXT) == wanted
        assert converted.count(path) == 1 + times  # a broken entry was written again
        assert entry.read_bytes() == whole
    assert kept(tmp_path) == sorted((entry, foreign))  # and no other files
    (tmp_path / "file").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert Tokenizer.load(path).encode(TEXT) == wanted


def test_smollm_cuts_digits_off_first(
    tokenizer: Tokenizer, tmp_path: Path, converted: list[Path]
) -> None:
    """Two spaces before a number are one token, as in the model's tokenizer.json."""
    folder = tmp_path / "spaces"
    write_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"].insert(0, ["Ġ", "Ġ"])
    content["model"]["vocab"]["ĠĠ"] = 299
    (folder / "tokenizer.json").write_text(json.dumps(content))
    double = Tokenizer.load(folder)
    gpt2 = Tokenizer.load(write_gguf_with(double, tmp_path / "gpt2.gguf"))
    by_digit = [
        Tokenizer.load(write_gguf_with(double, tmp_path / f"{pre}.gguf", pre=pre))
        for pre in ("smollm", "starcoder")
    ]
    spelled = [[t.texts[id_] for id_ in t.encode("a  78")] for t in (gpt2, *by_digit)]
    assert spelled == [["a", "Ġ", "Ġ", "7", "8"], *[["a", "ĠĠ", "7", "8"]] * 2]


# A cache entry gives what the files give

TRICKY = ("", " ", "  two before", "two after  ", "e\u0301 \u212b \u1100\u1161\u11a8", "1 22 333", "\t\n\r\n", "<s>",
          "</s>x<pad>", "\U0001f642\u200d\ufeff\ufffd\x00", "你好，世界", "don't I'LL", "[PAD7]", "x" * 300, TEXT)  # fmt: skip


@pytest.mark.parametrize("write", [write_tokenizer, write_sentencepiece])
def test_a_folder_is_read_once_and_stays_as_transformers_reads_it(
    tmp_path: Path, converted: list[Path], write: Callable[[Path], None]
) -> None:
    folder = tmp_path / "model"
    write(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    first = Tokenizer.load(folder)
    again = run_apart(folder)
    assert converted == [folder]
    for number, text in enumerate(TRICKY):
        ids = theirs(text)["input_ids"]
        part = theirs(text, add_special_tokens=False)["input_ids"]
        back = theirs.decode(ids[number % 3 :], skip_special_tokens=True, clean_up_tokenization_spaces=False)  # fmt: skip
        assert (first.encode(text), first.encode_part(text)) == (ids, part)
        assert first.decode(ids[number % 3 :]) == back
        assert again["texts"][number] == [ids, part, first.decode(ids)]
    assert first.eos_ids == tuple(again["eos"]) == (theirs.eos_token_id,)
    assert first.cached.special == theirs.special_tokens_map
    assert again["modules"] == []  # of transformers and its dependencies
    (folder / "tokenizer_config.json").write_text("{}")  # other files, another tokenizer
    Tokenizer.load(folder)
    assert converted == [folder, folder]


def run_apart(folder: Path) -> dict[str, Any]:
    """Return what another process reads of the tokenizer."""
    code = (
        "import json, sys; from pathlib import Path; from bass_cli.formats.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(Path(sys.argv[1]))\n"
        "texts = [[t.encode(x), t.encode_part(x), t.decode(t.encode(x))] for x in json.loads(sys.argv[2])]\n"
        "t.fingerprint(), t.size, t.has_chat_template\n"
        "print(json.dumps({'texts': texts, 'eos': t.eos_ids,\n"
        "                  'modules': [n for n in ('transformers', 'huggingface_hub', 'jinja2') if n in sys.modules]}))"
    )
    done = run_forked(code, str(folder), json.dumps(TRICKY), cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_that_was_kept_is_built_without_torch(tokenizer: Tokenizer) -> None:
    """Then it loads while torch is imported. Without a cache entry, or with a broken tokenizer, it
    is left to Tokenizer.load."""
    code = (
        "import sys; from bass_cli.config.job import Pair; from bass_cli.formats.tokenizer import begin\n"
        "found = begin(Pair(name='p', target=sys.argv[1]))()\n"
        "print(found and found.encode(sys.argv[2]), {'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )

    def begun(target: str) -> str:
        command = [sys.executable, "-c", code, target, TRICKY[0]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    Tokenizer.load(tokenizer.path)
    assert begun(str(tokenizer.path)) == f"{tokenizer.encode(TRICKY[0])} set()"
    assert begun(str(tokenizer.path / "nothing")) == "None set()"


@pytest.mark.parametrize(("family", "pre"), [("qwen2", "qwen2"), ("starcoder2", "starcoder")])
def test_a_gguf_tokenizer_is_the_same_the_first_time_and_later(
    tokenizer: Tokenizer, tmp_path: Path, converted: list[Path], family: str, pre: str
) -> None:
    """Writing and reading it with transformers would change it: its classes add a normalizer, or
    drop the splitting of digits."""
    path = tmp_path / "model.gguf"
    metadata = tokenizer_metadata(tokenizer.path, pad_to=305, pre=pre)
    write_gguf(family, path, vocab_size=305, metadata=metadata)
    first = Tokenizer.load(path)
    ids = [first.encode(text) for text in TRICKY]
    later = run_apart(path)
    assert [found[0] for found in later["texts"]] == ids
    assert (converted, later["modules"]) == ([path], [])
    steps = json.loads(first.cached.content)
    if pre == "qwen2":
        assert first.encode("e\u0301") == first.encode("\u00e9")
    else:
        kinds = [step["type"] for step in steps["pre_tokenizer"]["pretokenizers"]]
        assert kinds == ["Digits", "ByteLevel"]


def test_nothing_beside_a_gguf_file_is_read(
    tokenizer: Tokenizer, tmp_path: Path, converted: list[Path]
) -> None:
    alone = Tokenizer.load(write_gguf_with(tokenizer, tmp_path / "alone" / "model.gguf"))
    folder_with_code(tmp_path / "both", {"tokenizer_class": "Own", "eos_token": "the"}, {})
    path = write_gguf_with(tokenizer, tmp_path / "both" / "renamed.gguf")
    beside = Tokenizer.load(path)
    assert beside.cached == alone.cached
    assert len(converted) == 1  # the entry depends on the content of the file, not on its path
    kept(tmp_path)[0].unlink()
    assert Tokenizer.load(path).cached == alone.cached
    assert not (tmp_path / "both" / "ran").exists()


@pytest.mark.slow  # both import transformers
def test_two_processes_convert_the_same_tokenizer_at_once(
    tokenizer: Tokenizer, tmp_path: Path, converted: list[Path]
) -> None:
    path = write_gguf_with(tokenizer, tmp_path / "model.gguf")
    code = (
        "import sys; from pathlib import Path; from bass_cli.formats.tokenizer import Tokenizer\n"
        "import transformers; print(flush=True); input()\n"
        "print(Tokenizer.load(Path(sys.argv[1])).encode(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(path), TEXT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for one in both:
        assert one.stdout is not None
        one.stdout.readline()  # wait until it is ready
    for one in both:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    said = [one.communicate()[0] for one in both]
    assert said == [f"{Tokenizer.load(path).encode(TEXT)}\n"] * 2
    assert converted == []  # the entry is whole
    assert len(kept(tmp_path)) == 1


def with_token(folder: Path, text: str, id_: int) -> Tokenizer:
    """Return the tiny tokenizer with one more token."""
    write_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"][text] = id_
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(("name", "kind"), [
    ("tokenizer.json", "pipe"), ("tokenizer_config.json", "device"), ("config.json", "pipe"),
    ("chat_template.jinja", "pipe"), ("tokenizer.json", "large"), ("added_tokens.json", "device"), ("spiece.model", "pipe"),
])  # fmt: skip
def test_a_tokenizers_files_are_files(name: str, kind: str, tmp_path: Path) -> None:
    """A pipe without a writer, an endless device, and a sparse file of a terabyte are refused."""
    write_tokenizer(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "large":
        path.touch()
        os.truncate(path, 2**40)
    else:
        {"pipe": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero")}[kind](path)
    reason = (
        "cannot read the file: it has 1099511627776 bytes"
        if kind == "large"
        else "cannot read the file: a file is needed"
    )
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}: {reason}"):
        Tokenizer.load(tmp_path)


def test_an_id_far_beyond_the_others_is_not_counted_up_to(tmp_path: Path) -> None:
    """This holds for tokens and for placeholders. The tokenizers library itself counts up to the
    largest id, so ids have a limit."""
    far = 2**24 - 1
    one, other = with_token(tmp_path / "a", "far", far), with_token(tmp_path / "b", "[PAD1]", far)
    assert (one.size, other.size) == (far + 1, 299)
    check_same_vocabulary(one, other)
    check_same_vocabulary(one, one)
    for beyond in (far + 1, 2**32 - 2):
        with pytest.raises(UserError, match=rf"/c: token 'far' of the tokenizer has id {beyond};"):
            with_token(tmp_path / "c", "far", beyond)


@pytest.mark.parametrize(
    "content", ["null", "[]", "{", "[" * 10**5, '{"model": 3}', '{"a": ' + "9" * 6000 + "}"]
)
def test_a_tokenizer_that_is_none_names_its_folder(content: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(
        UserError, match=f"{re.escape(str(tmp_path))}: no tokenizer can be read there: "
    ):
        Tokenizer.load(tmp_path)


def test_errors_and_panics_of_the_library_are_one_sentence(tmp_path: Path) -> None:
    """Panics are not Exceptions. An error for too little memory says so."""
    write_tokenizer(tmp_path)

    class PanicException(BaseException):
        pass

    class Raising:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def encode(self, *_: object, **__: object) -> None:
            raise self.error

    for error, said in (
        (PanicException("index out of bounds\nmore"), "index out of bounds$"),
        (ValueError("no"), "no$"),
        (MemoryError(), "it takes more than 2048 MB of memory$"),
    ):
        tokenizer = Tokenizer.load(tmp_path)
        tokenizer.__dict__["_backend"] = Raising(error)
        for encode in (tokenizer.encode, tokenizer.encode_part):
            with pytest.raises(
                UserError, match=rf": the tokenizer cannot read the text: {said}"
            ) as caught:
                encode("a")
            assert str(tmp_path) in str(caught.value)
