"""The task ifeval: does a response follow the instructions of its prompt (arXiv 2311.07911)?

There are 25 kinds of instructions, each checked by a program: it gets a response and the arguments
from the data. It follows the published definition, also where another one would be better: keywords
are regular expressions, for example.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from bass_cli.errors import MachineError, nearest
from bass_cli.eval.tasks.task import Check, Defaults, Fields, Problem, Task, identity
from bass_cli.rank.code import without_thoughts
from bass_cli.reading import text, texts, whole

Arguments = Mapping[str, Any]
RELATIONS = ("less than", "at least")
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")  # constrained_response
# Without the white space before and the text after, which the published ones match too: both may be
# empty, and white space would take quadratic time.
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_ENDS_WORDS = frozenset(".,?!'\"")  # characters that end a paragraph's first word
_FENCES = ("```json", "```Json", "```JSON", "```")
_DETECTION = "langdetect"  # the package that detects languages, as in the published checks
_SENTENCES = "nltk"  # the package that finds sentences and words, as in the published checks


class IfEval(Task):
    """IFEval (Zhou et al., arXiv 2311.07911): prompts with instructions that programs can check.

    A sample passes if it follows all instructions of its prompt (strict, prompt level). `figures`
    has the other accuracies of the paper.
    """

    name, executes = "ifeval", False
    defaults = Defaults(max_new_tokens=1280)  # the longest prompts ask for 1,000 words and more
    stops = ()
    source = "hf:google/IFEval:train"
    needed: ClassVar[Fields] = {
        "key": identity,
        "prompt": text,
        "instruction_id_list": texts,
        "kwargs": lambda value: _argument_lists(value),
    }

    def problem(self, record: dict[str, Any]) -> Problem:
        names, given = record["instruction_id_list"], record["kwargs"]
        if len(names) != len(given):
            raise ValueError(
                f'field "kwargs": it has {len(given)} entries for {len(names)} instructions'
            )
        arguments = []
        for name, values in zip(names, given, strict=True):
            if name not in INSTRUCTIONS:
                near = nearest(name, INSTRUCTIONS)
                raise ValueError(f'field "instruction_id_list": there is no "{name}"; {near}')
            check_packages(name)
            arguments.append(_checked(name, values or {}))
        fields = {**record, "kwargs": arguments}
        return Problem(str(record["key"]), record["prompt"], fields)

    def question(self, problem: Problem) -> str:
        return problem.prompt

    def completion(self, problem: Problem, text: str, *, chat: bool) -> str:
        return text

    def check(self, problem: Problem, text: str) -> Check:
        followed = _followed(problem, text)["strict"]
        names = problem.fields["instruction_id_list"]
        missed = [name for name, one in zip(names, followed, strict=True) if not one]
        if not missed:
            return Check("passed")
        return Check("failed", f"{len(missed)} of {len(names)} not followed: {', '.join(missed)}")

    def figures(self, responses: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
        """Return the accuracies of the paper, strict and loose, over all samples.

        "prompt": the share of samples that follow all instructions. "instruction": the share of
        instructions that are followed. "by_kind": that share for each kind. A sample that is not
        finished follows none.
        """
        found: dict[str, Any] = {}
        kinds: dict[str, list[str]] = {"all": []}
        for name, problem in self.problems.items():
            kinds[name] = list(problem.fields["instruction_id_list"])
        rows = [
            (kinds[name], None if one is None else _followed(self.problems[name], one))
            for name, texts_of in responses.items()
            for one in texts_of
        ]
        for way in ("strict", "loose"):
            marks = [(names, row[way] if row else [False] * len(names)) for names, row in rows]
            pairs = [pair for names, row in marks for pair in zip(names, row, strict=True)]
            by_kind: dict[str, list[bool]] = {}
            for name, one in pairs:
                by_kind.setdefault(name, []).append(one)
            found[way] = {
                "prompt": sum(all(row) for _, row in marks) / max(len(marks), 1),
                "instruction": sum(one for _, one in pairs) / max(len(pairs), 1),
                "by_kind": {
                    name: sum(by_kind[name]) / len(by_kind[name]) for name in sorted(by_kind)
                },
            }
        return {"instructions": found}


def _argument_lists(value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(
        one is None or isinstance(one, dict) for one in value
    ):
        raise ValueError("a list of objects is needed, one for each instruction")
    return value


def _checked(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an instruction's arguments. The hub's files have all others too, as null.

    ValueError if one is missing, unknown or invalid.
    """
    given = {key: value for key, value in values.items() if value is not None}
    checks = INSTRUCTIONS[name].arguments
    for key in given.keys() - checks.keys():
        raise ValueError(f'field "kwargs": {name} has no argument "{key}"; {nearest(key, checks)}')
    for key, check in checks.items():
        if key not in given:
            raise ValueError(f'field "kwargs": {name} needs the argument "{key}"')
        try:
            check(given[key])
        except ValueError as error:
            raise ValueError(f'field "kwargs": {name}, argument "{key}": {error}') from None
    return given


def _followed(problem: Problem, response: str) -> dict[str, list[bool]]:
    """Return which instructions a response follows, strictly and loosely.

    What a reasoning model writes up to `</think>` is no part of the response.
    """
    response = without_thoughts(response)
    pairs = list(zip(problem.fields["instruction_id_list"], problem.fields["kwargs"], strict=True))
    return {
        "strict": [follows(name, response, given) for name, given in pairs],
        "loose": [follows_loosely(name, response, given) for name, given in pairs],
    }


class Instruction(NamedTuple):
    """A kind of instruction.

    Attributes:
        follows: returns whether a response that is not blank follows it.
        arguments: checks of its arguments. They raise ValueError.
        packages: the packages that `follows` needs.
    """

    follows: Callable[[str, Arguments], bool]
    arguments: Mapping[str, Callable[[Any], Any]] = {}
    packages: tuple[str, ...] = ()


def _relation(value: Any) -> str:
    if value not in RELATIONS:
        raise ValueError(f'"{RELATIONS[0]}" or "{RELATIONS[1]}" is needed')
    return str(value)


def _count(value: Any) -> int:
    """Check a count. The hub's files write it as a float."""
    return whole(int(value) if isinstance(value, float) and value.is_integer() else value)


def _pattern(value: Any) -> str:
    try:
        re.compile(text(value))
    except re.error as error:
        raise ValueError(f"a regular expression is needed: {error}") from None
    return str(value)


def _patterns(value: Any) -> list[str]:
    return [_pattern(one) for one in texts(value)]


def _letter(value: Any) -> str:
    if len(text(value)) != 1:
        raise ValueError("one character is needed")
    return str(value)


def _compare(found: int, relation: str, wanted: float) -> bool:
    return found < wanted if relation == RELATIONS[0] else found >= wanted


def _matches(pattern: str, response: str) -> int:
    return len(re.findall(pattern, response, flags=re.IGNORECASE))


def _has_keywords(response: str, given: Arguments) -> bool:
    return all(_matches(one, response) for one in given["keywords"])


def _keyword_frequency(response: str, given: Arguments) -> bool:
    return _compare(
        _matches(given["keyword"].strip(), response), given["relation"], given["frequency"]
    )


def _no_forbidden_words(response: str, given: Arguments) -> bool:
    return not any(_matches(rf"\b{one}\b", response) for one in given["forbidden_words"])


def _letter_frequency(response: str, given: Arguments) -> bool:
    found = response.lower().count(given["letter"].lower())
    return _compare(found, given["let_relation"], given["let_frequency"])


@functools.cache
def _detector() -> Any:
    """Return a detector of languages with a fixed seed: langdetect's own results are random."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.seed = 0
    return factory


def _is_language(response: str, code: str) -> bool:
    """Return whether a text is in a language. True if the language cannot be detected."""
    from langdetect import LangDetectException

    detector = _detector().create()
    detector.append(response)
    try:
        return bool(detector.detect() == code)
    except LangDetectException:
        return True


def _language(response: str, given: Arguments) -> bool:
    return _is_language(response, given["language"])


@functools.cache
def _sentences() -> Callable[[str], list[str]]:
    """Return NLTK's Punkt for English. LookupError if its data is missing."""
    from nltk.tokenize.punkt import PunktTokenizer

    find: Callable[[str], list[str]] = PunktTokenizer("english").tokenize
    return find


def _number_of_sentences(response: str, given: Arguments) -> bool:
    return _compare(len(_sentences()(response)), given["relation"], given["num_sentences"])


def _number_of_words(response: str, given: Arguments) -> bool:
    return _compare(len(re.findall(r"\w+", response)), given["relation"], given["num_words"])


def _number_of_paragraphs(response: str, given: Arguments) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", response)
    blank = [number for number, part in enumerate(parts) if not part.strip()]
    inside = set(blank) - {0, len(parts) - 1}
    return not inside and len(parts) - len(blank) == given["num_paragraphs"]


def _first_word(response: str, given: Arguments) -> bool:
    parts = response.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    place = given["nth_paragraph"]
    # The place counts blank paragraphs too, as in the published check.
    paragraph = parts[place - 1].strip() if place <= count else ""
    if not paragraph or count != given["num_paragraphs"]:
        return False
    word = paragraph.split()[0].lstrip("'").lstrip('"').lower()
    end = next((at for at, letter in enumerate(word) if letter in _ENDS_WORDS), len(word))
    return bool(word[:end] == given["first_word"].lower())


def _placeholders(response: str, given: Arguments) -> bool:
    return _count_brackets(response) >= int(given["num_placeholders"])


def _count_brackets(response: str) -> int:
    """Count the matches of `\\[.*?\\]` in linear time."""
    found = 0
    for line in response.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            found += 1
            start = line.find("[", end)
    return found


def _postscript(response: str, given: Arguments) -> bool:
    marker = given["postscript_marker"].strip()
    pattern = _POSTSCRIPTS.get(marker, marker.lower())
    return re.search(pattern, response.lower(), flags=re.MULTILINE) is not None


def _bullets(response: str, given: Arguments) -> bool:
    # The published ones have \s, which also matches the blank lines before, in quadratic time.
    stars = re.findall(r"^[^\S\n]*\*[^\*].*$", response, flags=re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", response, flags=re.MULTILINE)
    return len(stars) + len(dashes) == int(given["num_bullets"])


def _constrained(response: str, given: Arguments) -> bool:
    return any(option in response for option in OPTIONS)


def _highlights(response: str, given: Arguments) -> bool:
    """Count *highlights* and **highlights**. A double one counts in both ways if it can."""
    single = re.findall(r"\*[^\n\*]*\*", response)
    double = re.findall(r"\*\*[^\n\*]*\*\*", response)
    found = sum(bool(one.strip("*").strip()) for one in single + double)
    return found >= int(given["num_highlights"])


def _sections(response: str, given: Arguments) -> bool:
    pattern = rf"\s?{given['section_spliter'].strip()}\s?\d+\s?"
    return len(re.split(pattern, response)) - 1 >= int(given["num_sections"])


def _json(response: str, given: Arguments) -> bool:
    response = response.strip()
    for fence in _FENCES:
        response = response.removeprefix(fence)
    try:
        json.loads(response.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(response: str, given: Arguments) -> bool:
    for line in response.split("\n"):  # the match of `<<[^\n]+>>` in linear time
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(response: str, given: Arguments) -> bool:
    parts = [part.strip() for part in response.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _repeats_prompt(response: str, given: Arguments) -> bool:
    return response.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())


def _ends_with(response: str, given: Arguments) -> bool:
    return response.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


def _quotation(response: str, given: Arguments) -> bool:
    response = response.strip()
    return len(response) > 1 and response.startswith('"') and response.endswith('"')


def _capital_words(response: str, given: Arguments) -> bool:
    from nltk.tokenize import word_tokenize

    # Without its search for sentences, which only moves full stops from word to word.
    words = word_tokenize(response, preserve_line=True)
    found = sum(word.isupper() for word in words)
    return _compare(found, given["capital_relation"], given["capital_frequency"])


def _capitals(response: str, given: Arguments) -> bool:
    return response.isupper() and _is_language(response, "en")


def _lowercase(response: str, given: Arguments) -> bool:
    return response.islower() and _is_language(response, "en")


def _no_comma(response: str, given: Arguments) -> bool:
    return "," not in response


INSTRUCTIONS: dict[str, Instruction] = {
    "keywords:existence": Instruction(_has_keywords, {"keywords": _patterns}),
    "keywords:frequency": Instruction(
        _keyword_frequency, {"keyword": _pattern, "frequency": _count, "relation": _relation}
    ),
    "keywords:forbidden_words": Instruction(_no_forbidden_words, {"forbidden_words": _patterns}),
    "keywords:letter_frequency": Instruction(
        _letter_frequency, {"letter": _letter, "let_frequency": _count, "let_relation": _relation}
    ),
    "language:response_language": Instruction(_language, {"language": text}, (_DETECTION,)),
    "length_constraints:number_sentences": Instruction(
        _number_of_sentences, {"num_sentences": _count, "relation": _relation}, (_SENTENCES,)
    ),
    "length_constraints:number_paragraphs": Instruction(
        _number_of_paragraphs, {"num_paragraphs": _count}
    ),
    "length_constraints:number_words": Instruction(
        _number_of_words, {"num_words": _count, "relation": _relation}
    ),
    "length_constraints:nth_paragraph_first_word": Instruction(
        _first_word,
        {"num_paragraphs": _count, "nth_paragraph": lambda n: whole(_count(n), least=1)}
        | {"first_word": text},
    ),
    "detectable_content:number_placeholders": Instruction(
        _placeholders, {"num_placeholders": _count}
    ),
    "detectable_content:postscript": Instruction(_postscript, {"postscript_marker": _pattern}),
    "detectable_format:number_bullet_lists": Instruction(_bullets, {"num_bullets": _count}),
    "detectable_format:constrained_response": Instruction(_constrained),
    "detectable_format:number_highlighted_sections": Instruction(
        _highlights, {"num_highlights": _count}
    ),
    "detectable_format:multiple_sections": Instruction(
        _sections, {"section_spliter": _pattern, "num_sections": _count}
    ),
    "detectable_format:json_format": Instruction(_json),
    "detectable_format:title": Instruction(_title),
    "combination:two_responses": Instruction(_two_responses),
    "combination:repeat_prompt": Instruction(_repeats_prompt, {"prompt_to_repeat": text}),
    "startend:end_checker": Instruction(_ends_with, {"end_phrase": text}),
    "startend:quotation": Instruction(_quotation),
    "change_case:capital_word_frequency": Instruction(
        _capital_words, {"capital_frequency": _count, "capital_relation": _relation}, (_SENTENCES,)
    ),
    "change_case:english_capital": Instruction(_capitals, packages=(_DETECTION,)),
    "change_case:english_lowercase": Instruction(_lowercase, packages=(_DETECTION,)),
    "punctuation:no_comma": Instruction(_no_comma),
}


def check_packages(name: str) -> None:
    """Raise MachineError if what an instruction needs is not installed."""
    for package in INSTRUCTIONS[name].packages:
        if importlib.util.find_spec(package) is None:
            raise MachineError(
                f"the instruction {name} needs the package {package}, which is not installed: "
                "pip install 'bass-cli[ifeval]'; or leave out the problems that have it"
            )
    if name == "length_constraints:number_sentences":
        try:
            _sentences()
        except LookupError:
            raise MachineError(
                f"the instruction {name} needs NLTK's data punkt_tab, which is missing: "
                "python -m nltk.downloader punkt_tab; or leave out the problems that have it"
            ) from None


def follows(name: str, response: str, given: Arguments) -> bool:
    """Return whether a response follows an instruction. A blank response follows none."""
    return bool(response.strip()) and INSTRUCTIONS[name].follows(response, given)


def follows_loosely(name: str, response: str, given: Arguments) -> bool:
    """Return whether one of eight variants of a response follows an instruction.

    The variants leave out the first line, the last line, both or none, and asterisks or not. They
    forgive an introduction, a closing remark and Markdown's emphasis.
    """
    lines = response.split("\n")
    variants = [response] + ["\n".join(one).strip() for one in (lines[1:], lines[:-1], lines[1:-1])]
    return any(
        follows(name, one, given)
        for variant in variants
        for one in (variant, variant.replace("*", ""))
    )
