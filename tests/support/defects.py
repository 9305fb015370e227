"""Defects, one at a time: a module with one of its statements, conditions or contexts taken away.

What is taken away is found in the syntax tree, so that no test names a line of the source.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

TRUE, FALSE = ast.Constant(True), ast.Constant(False)
Change = tuple[str, str, Any]  # what is done, to which field of a node, and the field's value then


def defects(module: ModuleType, name: str) -> Iterator[tuple[str, Any]]:
    """What each defect of a class is, "function: what is done", and the module with it."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    [tested] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    for where, node in _functions(tested, name):
        for what, field, value in list(_changes(node)):
            kept = getattr(node, field)
            setattr(node, field, value)
            yield f"{where}: {what}", _load(tree, module)
            setattr(node, field, kept)


def _functions(node: ast.AST, where: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node inside of a function that does something, with the function's name."""
    for child in ast.iter_child_nodes(node):
        inside = f"{where}.{child.name}" if isinstance(child, ast.FunctionDef) else where
        if "." in inside and not inside.endswith("__init__"):
            yield inside, child
            yield from _functions(child, inside)


def _changes(node: ast.AST) -> Iterator[Change]:
    for field, value in ast.iter_fields(node):
        if field == "test" and isinstance(node, ast.If | ast.IfExp):
            yield f"if {ast.unparse(value)}: never", field, FALSE
        if field == "ifs" and value:
            yield f"{ast.unparse(node).strip()}: always", field, []
        for at, part in enumerate(value if isinstance(value, list) else ()):
            others = (value[:at], value[at + 1 :])
            if field == "values" and isinstance(node, ast.BoolOp):
                neutral = TRUE if isinstance(node.op, ast.And) else FALSE
                yield (
                    f"{ast.unparse(node)}, without {ast.unparse(part)}",
                    field,
                    [*others[0], neutral, *others[1]],
                )
            elif field == "elts" and isinstance(node, ast.Set):
                yield f"{ast.unparse(node)}, without {ast.unparse(part)}", field, others[0] + others[1]
            elif isinstance(part, ast.With):
                inside = ", ".join(map(ast.unparse, part.items))
                yield (
                    f"not with {inside}: {ast.unparse(part.body[0])}",
                    field,
                    [*others[0], *part.body, *others[1]],
                )
            elif _does_something(part) and not (isinstance(node, ast.While) and not others[0] + others[1]):
                yield f"no {ast.unparse(part)}", field, [*others[0], ast.Pass(), *others[1]]


def _does_something(statement: ast.AST) -> bool:
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, ast.Attribute) for target in statement.targets)
    call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return call or isinstance(statement, ast.AugAssign)


def _load(tree: ast.Module, like: ModuleType) -> Any:
    module = ModuleType(f"{like.__name__}_with_a_defect")
    sys.modules[module.__name__] = module  # dataclasses look for it there
    try:
        exec(compile(ast.fix_missing_locations(tree), str(like.__file__), "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return module
