"""Test classes of pydantic in place of a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from bass_cli.config.sampling import Sampling


def test_a_pydantic_class_is_its_schema() -> None:
    pytest.importorskip("llguidance")
    sampling = Sampling(json_schema=_Answer)  # type: ignore[arg-type]
    assert json.loads(sampling.json_schema or "") == _Answer.model_json_schema()


class _Answer(BaseModel):
    number: int


class _WithoutSchema(BaseModel):
    function: Callable[[int], int]


class _Undefined(BaseModel):
    other: _Nowhere  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("kind", [_WithoutSchema, _Undefined, BaseModel])
def test_a_pydantic_class_without_a_schema_is_refused_by_name(kind: type[BaseModel]) -> None:
    with pytest.raises(ValueError, match=rf"no schema of .*{kind.__name__}.*; correct the class"):
        Sampling(json_schema=kind)  # type: ignore[arg-type]
