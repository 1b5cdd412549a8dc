"""Make Triton's interpreter faster without changing its results. It does the same work at every
operation of a kernel: it looks up builtins, checks shapes and overflows, and builds types."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from triton.runtime import interpreter

language = interpreter.tl


def speed_up(patch: pytest.MonkeyPatch) -> None:
    """Apply all of the changes of this file until `patch` is undone."""
    skip_overflow_checks(patch)
    find_builtins_once(patch)
    patch_language_once(patch)
    share_shapes(patch)
    skip_equal_shapes(patch)


def skip_overflow_checks(patch: pytest.MonkeyPatch) -> None:
    """Turn off the overflow checks. They compute integer sums and products twice, a quarter of
    the time, and the result is only used in debug mode, which is off."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def find_builtins_once(patch: pytest.MonkeyPatch) -> None:
    """Search Triton's builtins once. The interpreter searches its whole language for them at
    every call of a device function; only whether they are patched already can change."""
    places = (
        language, language.core, language.tensor, language.math,
        language.core.tensor_descriptor_base,
    )  # fmt: skip
    builtins = {
        place: [one for one in inspect.getmembers(place) if language.core.is_builtin(one[1])]
        for place in places
    }
    assert len(builtins[language]) > 50

    def patch_builtins(place: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins[place]:
            if getattr(place, name) is member:
                interpreter._patch_attr(place, name, member, builder, scope)

    patch.setattr(interpreter, "_patch_builtin", patch_builtins)


def patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """Patch the language once for a kernel, not again at each call of a device function. The
    outermost call is the kernel's; only its patches are undone."""
    patch_language = interpreter._patch_lang
    patched: set[Any] = set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[Any]:
        known = (language, language.core)
        values = function.__globals__.values()
        return frozenset(one for one in values if inspect.ismodule(one) and one in known)

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if patched:
            inside = modules <= patched
            return interpreter._LangPatchScope() if inside else patch_language(function)
        scope = patch_language(function)
        undo = scope.restore

        def restore() -> None:
            patched.clear()
            undo()

        scope.restore = restore
        patched.update(modules)
        return scope

    patch.setattr(interpreter, "_patch_lang", patch_once)


def skip_equal_shapes(patch: pytest.MonkeyPatch) -> None:
    """Broadcast nothing where both operands have the same shape."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch.setattr(semantic, "broadcast_impl_value", broadcast_unequal)


def share_shapes(patch: pytest.MonkeyPatch) -> None:
    """Build and check each shape once, and find NumPy's type of each of Triton's once. Shapes are
    never changed, so types and tensors share them."""
    block, tensor = language.block_type, language.core.tensor
    make_block, make_tensor = block.__init__, tensor.__init__
    of_blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape)
        if not all(type(size) is int for size in key):  # sizes that the language has wrapped
            make_block(self, element_ty, shape)
            return
        if key not in of_blocks:
            make_block(self, element_ty, shape)
            of_blocks[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_blocks[key]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    patch.setattr(block, "__init__", init_block)
    patch.setattr(tensor, "__init__", init_tensor)
    patch.setattr(interpreter, "_get_np_dtype", once_by_name(interpreter._get_np_dtype))


def once_by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache a function of a type by the type's name."""
    found: dict[str, Any] = {}

    def cached(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = function(kind)
        return found[kind.name]

    return cached
