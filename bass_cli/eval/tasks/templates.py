"""Render the templates of a task file: Jinja in its sandbox, as in chat templates.

A child process with limits does it, because a template that came with a file may loop for ever or
fill the memory. A field that the data does not have is an error, not an empty text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bass_cli.errors import nearest
from bass_cli.formats.limits import Limited, RefusalError

# CPU seconds and bytes for the templates of one record; a usual record takes a millisecond
_SECONDS, _MEMORY = 10.0, 1 << 30
LARGEST = 1 << 24  # characters of a rendered text; no model's context has room for more
_UNDEFINED = re.compile(r"'(\w+)' is undefined")

Key = tuple[str, ...]


class TemplateError(ValueError):
    """A template that cannot be rendered, with the path of its key."""

    def __init__(self, key: Key, reason: str):
        super().__init__(reason)
        self.key = key


class Templates:
    """The templates of a file.

    Args:
        fields: templates by the names of further fields. Later ones can use earlier ones.
        texts: templates by key.
        lists: expressions by key, whose values are lists.
    """

    def __init__(
        self, fields: Mapping[str, str], texts: Mapping[Key, str], lists: Mapping[Key, str]
    ) -> None:
        import jinja2.sandbox  # before the child is forked

        del jinja2
        self._call = Limited(_renderer(fields, texts, lists), seconds=_SECONDS, memory=_MEMORY)
        self._any = next(iter(texts), ("fields",))

    def render(self, record: Mapping[str, Any]) -> dict[Key, Any]:
        """Render all templates with the fields of a record.

        Returns:
            A text for each template and a list of texts for each expression, by key.

        Raises:
            TemplateError: a template is not valid, or the record does not have a field.
        """
        try:
            rendered = json.loads(self._call(dict(record)))
        except RefusalError as error:
            raise TemplateError(self._any, str(error)) from None
        if "fault" in rendered:
            key, reason = rendered["fault"]
            raise TemplateError(tuple(key), reason)
        return {tuple(key): value for key, value in rendered["values"]}


def _renderer(
    fields: Mapping[str, str], texts: Mapping[Key, str], lists: Mapping[Key, str]
) -> Callable[[dict[str, Any]], bytes]:
    """Return the function for the child process: from a record to JSON."""
    compiled: dict[Key, Callable[[dict[str, Any]], Any]] = {}

    def value_of(key: Key, template: str, scope: dict[str, Any]) -> Any:
        if key not in compiled:
            compiled[key] = _compiled(template, is_expression=key in lists)
        return compiled[key](scope)

    def render(record: dict[str, Any]) -> bytes:
        import jinja2

        scope = {"record": record, **record}
        values = list[tuple[Key, Any]]()
        key: Key = ("fields",)
        try:
            for name, template in fields.items():
                key = ("fields", name)
                scope[name] = value_of(key, template, scope)
            for key, template in texts.items():
                values.append((key, value_of(key, template, scope)))
            for key, template in lists.items():
                values.append((key, _texts(value_of(key, template, scope))))
        except jinja2.UndefinedError as error:
            reason = str(error.message)
            if found := _UNDEFINED.match(reason):
                reason += f"; {nearest(found[1], scope)}"
            return json.dumps({"fault": (key, reason)}).encode()
        except jinja2.TemplateSyntaxError as error:
            return json.dumps({"fault": (key, f"line {error.lineno}: {error.message}")}).encode()
        except MemoryError:
            raise
        except Exception as error:  # any kind: a template calls methods of the data
            reason = f"{type(error).__name__}: {error}"[:500]
            return json.dumps({"fault": (key, reason)}).encode()
        return json.dumps({"values": values}).encode()

    return render


def _compiled(template: str, *, is_expression: bool) -> Callable[[dict[str, Any]], Any]:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["repr"] = repr  # a value as Python code, for tests
    if is_expression:
        expression = environment.compile_expression(template, undefined_to_none=False)
        return lambda scope: expression(**scope)
    text = environment.from_string(template)

    def render(scope: dict[str, Any]) -> str:
        rendered = text.render(**scope)
        if len(rendered) > LARGEST:
            raise ValueError(f"its text has {len(rendered)} characters; the limit is {LARGEST}")
        return rendered

    return render


def _texts(value: Any) -> Sequence[str]:
    """Return a list of texts. ValueError if the value is no list or is empty."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"a list of answers is needed, not {value!r:.80}")
    if any(isinstance(one, bool) or not isinstance(one, (str, int, float)) for one in value):
        raise ValueError(f"texts and numbers are needed, not {value!r:.80}")
    return [str(one) for one in value]
