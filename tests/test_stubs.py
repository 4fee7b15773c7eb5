"""``_C.pyi`` says what the compiled module holds: the same names, and the same parameters in the same order."""

from __future__ import annotations

import ast
import inspect
import re
import types
from pathlib import Path

import turnwise
import turnwise.state  # adds methods to compiled types
from turnwise import _C

STUB = ast.parse((Path(turnwise.__file__).parent / "_C.pyi").read_text(encoding="utf-8"))

# One parameter as `f(a: int, b: float = 1e-06, *, c: object = None)`: its name, and whether it has a default.
Parameter = tuple[str, bool]


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The public names of a stub's body, and the statement that declares each."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return {name: node for name, node in names.items() if not name.startswith("_")}


def stub_parameters(function: ast.FunctionDef) -> list[Parameter]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [(argument.arg, index >= first_default) for index, argument in enumerate(positional)]
    found += [
        (argument.arg, default is not None)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [parameter for parameter in found if parameter[0] not in ("self", "cls")]


def compiled_parameters(function: object) -> list[Parameter]:
    """The parameters in the signature line that pybind11 puts at the head of a docstring.

    Methods that are added to a compiled type in Python have a signature.
    """
    if isinstance(function, types.FunctionType):
        parameters = list(inspect.signature(function).parameters.values())[1:]
        return [
            (each.name, each.default is not each.empty) for each in parameters if each.kind is not each.VAR_POSITIONAL
        ]
    line = (getattr(function, "__doc__", None) or "").splitlines()[0]
    inside = re.match(r"\w+\((.*)\)(?: -> .*)?$", line)
    assert inside, f"no signature in the docstring of {function}: {line!r}"
    found = []
    for part in split_at_commas(inside.group(1)):
        if part in ("*", "/") or re.match(r"(self|cls)\b", part):
            continue
        name = re.match(r"\w+", part)
        assert name, f"no parameter name in {part!r}"
        found.append((name.group(), " = " in part))
    return found


def split_at_commas(text: str) -> list[str]:
    """The comma-separated parts of ``text``, brackets kept whole: ``a: tuple[int, int], b`` has two."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "[(<{") - (character in "])}" or (character == ">" and text[index - 1] != "-"))
        if character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def public(owner: object) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def functions() -> list[tuple[str, object, ast.FunctionDef]]:
    """Every function and method that both sides have: ``("Store.fork", the compiled one, the stub's)``."""
    pairs = []
    for name, node in declared(STUB.body).items():
        here = getattr(_C, name, None)
        if isinstance(node, ast.FunctionDef):
            pairs.append((name, here, node))
        elif isinstance(node, ast.ClassDef) and here is not None:
            methods = {key: child for key, child in declared(node.body).items() if isinstance(child, ast.FunctionDef)}
            for key, child in methods.items():
                if not child.decorator_list:  # a property has no signature of its own
                    pairs.append((f"{name}.{key}", getattr(here, key, None), child))
    return pairs


def test_same_names_members_and_parameters() -> None:
    assert public(_C) == declared(STUB.body).keys()
    for node in STUB.body:
        if isinstance(node, ast.ClassDef) and node.name not in FACADES:
            assert public(getattr(_C, node.name)) == declared(node.body).keys(), node.name
    for name, compiled, stub in functions():
        assert compiled is not None, f"{name} stands in the stub alone"
        assert compiled_parameters(compiled) == stub_parameters(stub), name


# What these have is held against dict and list themselves, in tests/state.
FACADES = ("StateDict", "StateList")


def test_reads_signatures_as_pybind11_writes_them() -> None:
    function = types.SimpleNamespace(
        __doc__="f(a: typing.SupportsInt, b: tuple[int, float] = (1, 2.0), *, c: object = None) -> set[int]\n\nSums."
    )
    assert compiled_parameters(function) == [("a", False), ("b", True), ("c", True)]
