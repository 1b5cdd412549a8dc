"""Import torch without the parts that a job does not use.

`import torch` runs the code of 830 modules. A third of its processor time goes to modules for
compilers, tensors without memory, distributions, data sets and quantisation during training. Here
these are imported when they are first used, as torch itself does with some others. Only commands
import torch in this way; a program that uses the library has all of torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_META = "torch._meta_registrations"  # with torch._decomp, torch._prims and torch._refs
_POSTPONED = {
    _META,
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
    "torch.utils.data",
}
# Modules whose import completes torch. Models of transformers have no memory at first. The others
# are in import cycles with `_META`, and torch.distributed.tensor imports torch._decomp.
_USERS = {"torch._decomp", "torch._dynamo", "torch._inductor", "torch._refs", "transformers"}


class _StandIn(ModuleType):
    """A module in place of another one while torch is imported."""

    def __getattr__(self, name: str) -> Any:
        # `inspect` reads such names of all modules; those that there are were set before.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each postponed module, at the first import of it."""

    def __init__(self) -> None:
        self.made: list[ModuleType] = []
        self._left = set(_POSTPONED)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._left:
            return None
        self._left.remove(name)
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.made.append(_StandIn(spec.name))
        return self.made[-1]

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_torch() -> None:
    """Import torch without the postponed modules.

    They are imported at the first access to them. Operations on tensors without memory are missing
    until `complete_torch`, which is also called before one of `_USERS` is imported.
    """
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("torch")
    finally:
        sys.meta_path.remove(finder)
        for module in finder.made:
            _replace(module)
    sys.meta_path.insert(0, _BeforeUsers())
    _allow_generators()


def _allow_generators() -> None:
    """Do what torch._prims does for torch.Generator since torch 2.13: it cannot be called before.
    torch._prims may do so again."""
    native = importlib.import_module("torch._C")
    if hasattr(native, "_set_generator_metaclass"):
        base = importlib.import_module("torch._opaque_base")
        native._set_generator_metaclass(base.OpaqueBaseMeta)


def complete_torch() -> None:
    """Register the operations on tensors without memory ("meta", FakeTensorMode)."""
    importlib.import_module(_META)


class _BeforeUsers(importlib.abc.MetaPathFinder):
    """Completes torch before one of `_USERS` is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _USERS:
            return None
        complete_torch()
        there = sys.modules.get(name)
        if there is None:
            return None
        # importlib takes the spec of a module that is there now, not the one that is returned
        there.__spec__ = importlib.machinery.ModuleSpec(name, _Loaded(there))
        return there.__spec__


class _Loaded(importlib.abc.Loader):
    """Gives a module that was imported while its spec was looked for: no second run of its code."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _replace(module: ModuleType) -> None:
    """Remove a stand-in, and let an access to its name import the module."""
    parent_name, _, child = module.__name__.rpartition(".")
    parent = sys.modules.get(parent_name)
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]
    if parent is not None and parent.__dict__.get(child) is module:
        delattr(parent, child)
        other: Callable[[str], Any] | None = parent.__dict__.get("__getattr__")

        def find(name: str) -> Any:
            if name == child:
                return importlib.import_module(module.__name__)
            if other is None:
                raise AttributeError(f"module {parent_name!r} has no attribute {name!r}")
            return other(name)

        parent.__getattr__ = find  # type: ignore[method-assign]
