"""Docstrings of what the reference documents: arguments, results and errors, each in its section."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"^\.\. auto(function|class|exception):: ([\w.]+)(\(.*\))?\n((?:   :.*\n?)*)", re.M)
SECTION = re.compile(r"^(?:Args|Attributes|Returns|Yields|Raises):$", re.M)


def found(path: str) -> Any:
    """Return the object `path`, such as `distributed.state.TrainState`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def documented() -> Iterator[tuple[str, Any]]:
    """Yield (name, function or class) for everything that the pages of the reference document."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for kind, path, _, options in DIRECTIVE.findall(page.read_text()):
            documented_object = found(path)
            yield path, documented_object
            listed = re.search(r":members:(.*)", options)
            if kind == "function" or listed is None:
                continue
            left_out = "".join(re.findall(r":exclude-members:(.*)", options)).split()
            names = re.findall(r"\w+", listed[1]) or [name for name in vars(documented_object) if name[0] != "_"]
            for name in names:
                member = inspect.getattr_static(documented_object, name)
                member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if name not in left_out and inspect.isfunction(member) and member.__doc__:
                    yield f"{path}.{name}", member


def lacks(documented_object: Any) -> list[str]:
    """Return the sections that the docstring of a function or a class lacks."""
    doc = inspect.cleandoc(documented_object.__doc__ or "")
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(documented_object))).body
    sections = {section.rstrip(":") for section in SECTION.findall(doc)}
    is_prose = not sections and re.search(r"(?:^|\. )(?:Return|Yield) ", doc) is not None
    needed = {
        "Args": has_parameters(node) and not sections & {"Args", "Attributes"},
        "Returns": has_result(node) and not sections & {"Returns", "Yields"} and not is_prose,
        "Raises": raises(node) and not re.search(r"\bRaises\b|^Raise ", doc),
    }
    return [section for section, is_lacking in needed.items() if is_lacking]


def functions_of(node: ast.ClassDef | ast.FunctionDef) -> list[ast.FunctionDef]:
    """Return the function itself, or what the constructor of a class runs."""
    if isinstance(node, ast.FunctionDef):
        return [node]
    made = ("__init__", "__post_init__")
    return [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in made]


def has_parameters(node: ast.ClassDef | ast.FunctionDef) -> bool:
    if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return any(isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each) for each in node.body)
    every = [
        argument.arg
        for each in functions_of(node)
        for argument in [
            *each.args.posonlyargs,
            *each.args.args,
            *each.args.kwonlyargs,
            each.args.vararg,
            each.args.kwarg,
        ]
        if argument is not None
    ]
    return bool({*every} - {"self", "cls"})


def has_result(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Return whether a function returns something. The docstring of a property names its value."""
    if isinstance(node, ast.ClassDef) or node.returns is None:
        return False
    is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
    return not is_property and ast.unparse(node.returns) != "None"


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes inside it."""
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            yield each
            yield from statements_of(each)


def raises(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Return whether the body itself raises an error of a named class, with arguments or without."""
    raised = [
        each.exc for function in functions_of(node) for each in statements_of(function) if isinstance(each, ast.Raise)
    ]
    classes = [each.func if isinstance(each, ast.Call) else each for each in raised if each is not None]
    return any(ast.unparse(each).endswith("Error") for each in classes)


def test_every_documented_name_says_what_it_takes_returns_and_raises():
    everything = dict(documented())

    assert len(everything) > 100 and "distributed.Session.gather" in everything
    assert {name: lacking for name, each in everything.items() if (lacking := lacks(each))} == {}


class Complete:
    """Divide.

    Args:
        divisor: a number.

    Raises:
        ValueError: it is 0.
    """

    def __init__(self, divisor: float) -> None:
        if not divisor:
            raise ValueError("0")

    def of(self, number: float) -> float:
        """Divide `number`.

        Args:
            number: a number.
        """
        raise ValueError(number)

    def briefly(self) -> float:
        """Return a number. Raises ValueError."""
        raise ValueError

    def silently(self) -> float:
        """Return a number."""
        raise ValueError

    @property
    def divisor(self) -> float:
        """The divisor."""
        raise ValueError(self)


@pytest.mark.parametrize(
    ("documented_object", "lacking"),
    [
        (Complete, []),
        (Complete.of, ["Returns", "Raises"]),
        (Complete.briefly, []),
        (Complete.silently, ["Raises"]),
        (Complete.divisor.fget, ["Raises"]),
        (found, ["Args"]),
    ],
)
def test_what_a_docstring_lacks_is_found(documented_object, lacking):
    assert lacks(documented_object) == lacking
