"""Programs that differ from a given one in one place, most of them wrong."""

from __future__ import annotations

import ast
import random

_NUMBERS = (ast.Add, ast.Sub, ast.Mult, ast.Mod)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.Eq, ast.NotEq)
_WRAPPERS = ("list", "str", "tuple", "iter", "float", "frozenset")


def mutants(text: str, name: str, count: int, seed: int) -> list[str]:
    """Return at most `count` variants that differ within the function `name`.

    The same seed gives the same variants.
    """
    noise, found = random.Random(seed), set[str]()
    for _ in range(100 * count):
        tree = ast.parse(text)
        (function,) = [one for one in tree.body if getattr(one, "name", None) == name]
        if _change(noise.choice(list(ast.walk(function))), noise):
            found.add(ast.unparse(ast.fix_missing_locations(tree)))
        if len(found) == count:
            break
    return sorted(found)


def _change(node: ast.AST, noise: random.Random) -> bool:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += noise.choice((-1, 1))
    elif isinstance(node, ast.BinOp):
        node.op = noise.choice(_NUMBERS)()
    elif isinstance(node, ast.Compare):
        node.ops = [noise.choice(_ORDERS)(), *node.ops[1:]]
    elif isinstance(node, ast.Return) and node.value is not None:
        wrapper = ast.Name(noise.choice(_WRAPPERS), ast.Load())
        node.value = noise.choice((ast.Constant(None), ast.Call(wrapper, [node.value], [])))
    else:
        return False
    return True
