"""The size of the adapter protocol, and who may change an adapter or the setup of a fit. Read from the source: no engine is loaded."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import distributed
from distributed.backends.base import Backend

ROOT = Path(distributed.__file__).parent
MOST_PUBLIC, MOST_METHODS = 24, 40
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass
class Found:
    """A class of the package."""

    methods: list[ast.FunctionDef | ast.AsyncFunctionDef]
    bases: list[str]  # "module:Class"

    @property
    def names(self) -> set[str]:
        return {method.name for method in self.methods} - set(dir(object))


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Module -> its syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


@functools.cache
def classes() -> dict[str, Found]:
    """ "module:Class" -> what it defines itself."""
    found = {}
    for module, tree in sources().items():
        origin = {
            (alias.asname or alias.name): (node.module, alias.name)
            for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }  # fmt: skip
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, FUNCTIONS)]
                found[f"{module}:{node.name}"] = Found(methods, [place(base, module, origin) for base in node.bases])
    return found


def place(base: ast.expr, module: str, origin: dict[str, tuple[str | None, str]]) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        package, name = origin.get(base.value.id, ("", base.value.id))
        return f"{package}.{name}:{base.attr}"
    if isinstance(base, ast.Name):
        package, name = origin.get(base.id, (module, base.id))
        return f"{package}:{name}"
    return ""


def all_names(name: str, found: dict[str, Found]) -> set[str]:
    """Methods of a class and of its bases in this package."""
    if name not in found:
        return set()
    return set.union(found[name].names, *(all_names(base, found) for base in found[name].bases))


def test_the_protocol_has_few_methods_and_those_that_an_engine_owes_come_first() -> None:
    methods = classes()["distributed.backends.base:Backend"].methods
    public = [method.name for method in methods if not method.name.startswith("_")]
    owed = [name for name in public if name in Backend.__abstractmethods__]
    assert len(public) <= MOST_PUBLIC
    assert public[: len(owed)] == owed and len(owed) == len(Backend.__abstractmethods__)


def test_no_class_has_many_methods() -> None:
    found = classes()
    sizes = {name: len(all_names(name, found)) for name in found}
    assert sizes["distributed.backends.ray:RayBackend"] > len(found["distributed.backends.base:Backend"].methods)
    assert {name: size for name, size in sizes.items() if size > MOST_METHODS} == {}


ADAPTERS = ("backend", "adapter")
SETUPS = ("setup", "fits", "request", "finder", "tried", "trainer")


def is_one_of(node: ast.expr, names: set[str], attributes: set[str]) -> bool:
    """Whether an expression is such an object, by its name: `backend`, `self._backend`, `run.backend`, or a name bound to one."""
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Attribute) and node.attr in attributes


def changed(function: ast.AST, called: Iterable[str] = ADAPTERS) -> Iterator[str]:
    """The attributes of objects of these names that a function sets or deletes."""
    names, attributes = set(called), {form for name in called for form in (name, f"_{name}")}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                if len(values) == len(targets):
                    pairs = zip(targets, values, strict=True)
                    names |= {t.id for t, v in pairs if isinstance(t, ast.Name) and is_one_of(v, names, attributes)}
    for node in ast.walk(function):
        targets = itertools.chain(getattr(node, "targets", ()), [getattr(node, "target", None)])
        for target in itertools.chain.from_iterable(t.elts if isinstance(t, ast.Tuple) else [t] for t in targets if t):
            if isinstance(target, ast.Attribute) and is_one_of(target.value, names, attributes):
                yield ast.unparse(target)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
            and is_one_of(node.args[0], names, attributes)
        ):
            yield ast.unparse(node)


def test_nobody_changes_an_adapter_from_outside() -> None:
    assert list(changed(ast.parse("def f(setup):\n own, n = setup.backend, 1\n own.merged, x = 1, 2"))) == [
        "own.merged"
    ]
    assert list(changed(ast.parse("setattr(self._backend, 'on_event', print)"))) != []
    found = {module: list(changed(tree)) for module, tree in sources().items()}
    assert {module: each for module, each in found.items() if each} == {}


def test_nobody_changes_the_setup_of_a_fit_from_outside() -> None:
    assert list(changed(ast.parse("fits.setup.merged, finder.setup.run_dir = 1, 2"), SETUPS)) != []
    assert list(changed(ast.parse("own = trainer.setup\nown.callbacks = []"), SETUPS)) == ["own.callbacks"]
    found = {module: list(changed(tree, SETUPS)) for module, tree in sources().items()}
    assert {module: each for module, each in found.items() if each} == {}
