"""Parse the YAML of a pair file, with the line of each value.

Aliases of lists and mappings, which a few lines can expand to billions of values, and deep nesting
are refused. config/job.py defines the keys.
"""

from __future__ import annotations

from typing import Any

import yaml

MOST_BYTES = 1 << 16  # a pair file has a few hundred bytes; PyYAML parses this size in a second
_DEEPEST = 20  # levels of nesting; a pair file has two or three


class BrokenYamlError(ValueError):
    """A fault of a YAML file, with its line number."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


def parse_yaml(content: bytes) -> tuple[yaml.Node | None, Any]:
    """Parse one document; return its nodes, which have line numbers, and its value.

    BrokenYamlError if it is not valid.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BrokenYamlError(
            content.count(b"\n", 0, error.start) + 1, "the file is not valid UTF-8"
        ) from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line, code = text.count("\n", 0, error.position) + 1, ord(text[error.position])
        raise BrokenYamlError(
            line, f"broken YAML: the character U+{code:04X} is not allowed"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BrokenYamlError(
            mark.line + 1 if mark else 1, f"broken YAML: {error.problem or error.context}"
        ) from None


class _Loader(yaml.SafeLoader):
    """A SafeLoader that raises only YAMLError, with the place of the fault."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        mark: Any = event.start_mark
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"more than {_DEEPEST} levels", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent) and not isinstance(node, yaml.ScalarNode):
            raise yaml.composer.ComposerError(
                None, None, "an alias may only stand for a single value", mark
            )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, TypeError, KeyError, IndexError, AttributeError):
            # errors of int, float and datetime ("!!int abc", 2001-99-99, 6,000 digits), and of
            # PyYAML at odd tags
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"this is not a value of the type {kind}", node.start_mark
            ) from None
