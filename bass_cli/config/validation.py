"""Validate the parts of a job, and name file, line and key of a fault. `Strict` is their base.

pydantic does the work; its errors are described in the words of this project. Pair files and task
files are read here: the keys of all parts that have a model of their own are checked, also in
lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from bass_cli.config.options import kind_of
from bass_cli.config.other_names import option_called
from bass_cli.errors import UserError, nearest
from bass_cli.reading import BrokenYamlError, parse_yaml, shown, unquoted


class Strict(BaseModel, frozen=True):
    """The base of all parts of a job: frozen, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_field(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(
                    f'there is no field "{unquoted(name)}"; {cls._instead_of(str(name))}'
                )
        return given

    @classmethod
    def _instead_of(cls, name: str) -> str:
        path = option_called(name)
        if path is None:
            return nearest(name, cls.model_fields)
        field = path.rpartition(".")[2]
        return (
            f'bass calls it "{field}"' if field in cls.model_fields else f'Job has it as "{path}"'
        )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_as_number(cls, value: Any, info: Any) -> Any:
        if not isinstance(value, bool):  # first, because it is fast
            return value
        if kind_of(cls.model_fields[info.field_name].annotation) in (int, float):
            raise ValueError("a number is needed, not true or false")
        return value


# Messages for pydantic's errors about values of another type
_NEEDED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number is needed"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number is needed"),
    "finite_number": "a finite number is needed",
    "string_type": "a text is needed",
    "tuple_type": "a text or a list of texts is needed",
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false is needed"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping is needed"),
    "string_too_short": "it is empty",
}


def reason_of(fault: Mapping[str, Any]) -> str:
    """Describe one error of pydantic, with the value."""
    kind, value = fault["type"], fault["input"]
    if kind == "missing":
        return "it is missing"
    message = fault["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    reason = _NEEDED.get(kind) or message[:1].lower() + message[1:]
    known = kind == "string_too_short" or (kind == "value_error" and isinstance(value, dict))
    file = isinstance(value, str) and f" {value}: " in reason
    named = file or shown(value) in reason
    return reason if known or named else f"{reason} (got {shown(value)})"


def first_fault(error: ValidationError) -> tuple[tuple[str, ...], str]:
    """Return the key path of the first fault, without pydantic's union steps, and a reason."""
    path, reason = located_fault(error, ())
    return tuple(map(str, path)), reason


def located_fault(
    error: ValidationError, items: Container[tuple[str | int, ...]]
) -> tuple[tuple[str | int, ...], str]:
    """Return the same, with the numbers of list items whose paths are in `items`."""
    fault = error.errors(include_url=False)[0]
    own_steps = re.compile(r"literal\[|int$|function-")
    path: tuple[str | int, ...] = ()
    for step in fault["loc"]:
        if (*path, step) in items if isinstance(step, int) else not own_steps.match(step):
            path = (*path, step)
    return path, reason_of(fault)


M = TypeVar("M", bound=Strict)
KeyPath = tuple[str | int, ...]


class Located(NamedTuple):
    """The lines of a YAML file's keys, by their path; items of lists have a number in it."""

    place: str
    lines: Mapping[KeyPath, int]

    def at(self, *path: str | int) -> str:
        """Return the place of a key as "FILE:LINE: key "NAME"", for a message.

        The line is that of the nearest key around it that the file has.
        """
        ends = range(len(path), 0, -1)
        line = next((self.lines[path[:end]] for end in ends if path[:end] in self.lines), 1)
        key = f': key "{".".join(map(str, path))}"' if path else ""  # a rule about several keys
        return f"{self.place}:{line}{key}"


def parse_model(
    content: bytes,
    model: type[M],
    place: str,
    *,
    kind: str,
    folder: Path | None,
    elsewhere: Callable[[str], str | None] = lambda word: None,
) -> tuple[M, Located]:
    """Parse and validate a file.

    Args:
        content: the file.
        model: the model of the file's top level. It has the fields `name` and `folder`.
        place: the file's name in messages. Without suffix it is the default of `name`.
        kind: what the file should be, for the message if it is no mapping.
        folder: the folder of relative paths: a field that is not a key of the file, and the context
            of the validation.
        elsewhere: returns where a key belongs that the file does not have; None if it is unknown.

    Returns:
        The model, and the lines of its keys.

    Raises:
        UserError: the message names file, line and key, and the nearest valid key.
    """
    try:
        node, data = parse_yaml(content)
    except BrokenYamlError as error:
        raise UserError(f"{place}:{error.line}: {error}") from None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{place}:1: {kind}")
    located = Located(place, _Lines(model, place, elsewhere).of(node, model, ()))
    context = {"folder": folder}
    try:
        found = model.model_validate({"name": Path(place).stem} | data | context, context=context)
    except ValidationError as error:
        path, reason = located_fault(error, located.lines)
        reason = re.sub(r"`([a-z_.]+)`", r'"\1"', reason)  # keys here, not flags of a command
        raise UserError(f"{located.at(*path)}: {reason}") from None
    return found, located


class _Lines(NamedTuple):
    """Finds the lines of a file's keys. `top`: the model of its top level."""

    top: type[Strict]
    place: str
    elsewhere: Callable[[str], str | None]

    def of(self, node: yaml.MappingNode, model: type[Strict], path: KeyPath) -> dict[KeyPath, int]:
        """Return the line of every key, at any depth; UserError at an unknown or duplicate key."""
        lines: dict[KeyPath, int] = {}
        known = {name: field.annotation for name, field in _keys_of(model)}
        for key, value in node.value:
            word = str(key.value)
            here, line = (*path, word), key.start_mark.line + 1
            if word not in known or not key.tag.endswith(":str"):
                unknown = unquoted(".".join(map(str, here)))
                hint = self._place_of(word) or nearest(word, known)
                raise UserError(f'{self.place}:{line}: unknown key "{unknown}"; {hint}')
            if here in lines:
                raise UserError(
                    f'{self.place}:{line}: key "{".".join(map(str, here))}" is given twice, first '
                    f"in line {lines[here]}"
                )
            lines[here] = line
            inner = next(_models_in(known[word]), None)
            if inner is None:
                continue
            if isinstance(value, yaml.MappingNode):
                lines |= self.of(value, inner, here)
            elif isinstance(value, yaml.SequenceNode):
                for number, item in enumerate(value.value):
                    at = (*here, number)
                    lines[at] = item.start_mark.line + 1
                    if isinstance(item, yaml.MappingNode):
                        lines |= self.of(item, inner, at)
        return lines

    def _place_of(self, word: str) -> str | None:
        """Return a clause that says where a key of another level belongs; None if nowhere."""
        for *outer, _ in _paths_of(word, self.top):
            if not outer:
                return f'write "{word}" at the top level of the file'
            return f'write it under "{".".join(outer)}"'
        return self.elsewhere(word)


def _keys_of(model: type[Strict]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a file with this model, and their fields."""
    return ((name, field) for name, field in model.model_fields.items() if name != "folder")


def _paths_of(word: str, model: type[Strict]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the keys with this name, in a file with this model."""
    for name, field in _keys_of(model):
        if name == word:
            yield (name,)
        for inner in _models_in(field.annotation):
            yield from ((name, *path) for path in _paths_of(word, inner))


def _models_in(annotation: Any) -> Iterator[type[Strict]]:
    """Yield the models in an annotation, such as that of `tuple[Model, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
