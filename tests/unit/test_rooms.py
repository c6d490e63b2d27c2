"""Where things are: few rooms, each with a sentence of its own, and no circle of imports anywhere."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

import distributed
from distributed.config.registry import REGISTRY

HOME = Path(distributed.__file__).parent
MODULES = {
    ".".join(path.relative_to(HOME.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in HOME.rglob("*.py")
}
MOST_ROOMS = 22
# What belongs there; what does not. The second part names another room, or says "not".
ONE_SENTENCE = re.compile(r"[^;]+; [^;]*(`\w+`|\bnot\b)[^;]*\.")
# Private matters of the engines, as they are written in code. Only `backends/` and the data here may have them.
PRIVATE = {
    "the live worker pool of a DataLoader": r"\b_iterator\b",
    "torch's profiler": r"_profiler_enabled|torch\.profiler|autograd\.profiler",
    "torch's handlers of env:// and tcp://": r"_rendezvous_handlers",
    "the variable by which Keras chooses its engine": r"KERAS_BACKEND",
    "errors of gloo, NCCL, torch.distributed and Horovod": (
        r"HorovodInternalError|Horovod has been shut down|NCCL communicator|unhandled system error|connectFullMesh"
        r"|(recv|send)(Bytes|Value) failed|Dist(Network|Store|Backend)?Error\b|Connection closed by peer|Socket Timeout"
    ),
    "seeding torch or Keras": r"manual_seed|set_random_seed",
}
DATA = (
    "config/registry.py",  # what the entries say of their engines
    "config/peers.py",  # names of the settings of other tools
    "testing/jobs/",  # scripts that the conformance suite runs, as a user's
)


@functools.cache
def tree_of(name):
    """The syntax tree of a module."""
    return ast.parse(MODULES[name].read_text())


def imports_of(name):
    """The modules of the package that `name` imports at run time: at the top and inside functions, not for types alone."""
    found, waiting = set(), [tree_of(name)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: a relative import"
            modules = (f"{node.module}.{each.name}" for each in node.names)
            found.update(each if each in MODULES else node.module for each in modules)
        waiting += ast.iter_child_nodes(node)
    return found & MODULES.keys()


def circles(graph):
    """The first circle that is found, as the names on it; none where there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_over_others():
    graph = {name: imports_of(name) for name in MODULES}
    assert sum(map(len, graph.values())) > 1000
    assert circles(graph) == []
    assert circles({**graph, "distributed.errors": {"distributed.trainer"}})  # it is found where there is one


# Names of our own code in strings: "distributed.module" or "distributed.module:name". No tool sees the import behind them.
NAME = re.compile(r"distributed(\.\w+)+(:\w+)?")
REGISTRIES = {"distributed.config.registry", "distributed.loggers.registry"}
COMMAND = "distributed.cli"  # it is started as a process of its own


def names_in(name):
    """The strings of module `name` that name our own code."""
    strings = (node.value for node in ast.walk(tree_of(name)) if isinstance(node, ast.Constant))
    return {text for text in strings if isinstance(text, str) and NAME.fullmatch(text)}


def defined_in(name):
    """The functions, classes and variables at the top of module `name`."""
    for node in tree_of(name).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))


def test_names_in_the_entries_of_a_registry_resolve():
    names = {name for registry in REGISTRIES for name in names_in(registry)}
    assert len(names) > 20
    for name in names:
        module, _, thing = name.partition(":")
        assert module in MODULES and (not thing or thing in defined_in(module)), name
    entries = [entry for entry in REGISTRY.values() if entry.module.startswith("distributed.")]
    assert entries and [entry.name for entry in entries if entry.class_name not in defined_in(entry.module)] == []


def test_no_other_code_names_functions_in_strings_or_modules_above_itself():
    project = tomllib.loads((HOME.parent / "pyproject.toml").read_text())
    (contract,) = project["tool"]["importlinter"]["contracts"]
    height = {room: -number for number, layer in enumerate(contract["layers"]) for room in layer.split(" : ")}
    named = {(name, text) for name in MODULES.keys() - REGISTRIES for text in names_in(name)}
    assert [(name, text) for name, text in named if ":" in text] == []
    modules = [(name, text) for name, text in named if text in MODULES and text != COMMAND]
    assert ("distributed.backends.starting", "distributed.launching.forkserver") in modules
    assert [(name, text) for name, text in modules if height[name.split(".")[1]] < height[text.split(".")[1]]] == []


def test_there_are_few_rooms_and_each_says_what_belongs_there():
    modules = [path for path in HOME.glob("*.py") if path.name != "__init__.py"]
    rooms = modules + [path.parent for path in HOME.glob("*/__init__.py")]  # not what an older checkout left behind
    assert len(rooms) <= MOST_ROOMS, sorted(room.name for room in rooms)
    files = [room / "__init__.py" if room.is_dir() else room for room in rooms]
    sentences = defaultdict(list)
    for file in files:
        sentences[(ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]].append(file)
    assert all(ONE_SENTENCE.fullmatch(sentence) and len(same) == 1 for sentence, same in sentences.items()), sentences


def test_the_picture_is_what_the_code_says():
    script = HOME.parent / "scripts" / "draw_rooms.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_two_public_classes_have_one_name():
    homes = defaultdict(list)
    for name in MODULES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert len(homes) > 300
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("words", PRIVATE.values(), ids=PRIVATE)
def test_only_backends_and_data_know_the_private_matters_of_an_engine(words):
    lines = defaultdict(list)
    for path in MODULES.values():
        home = path.relative_to(HOME).as_posix()
        if not home.startswith(DATA):
            side = "inside" if home.startswith("backends/") else "outside"
            found = enumerate(path.read_text().splitlines(), 1)
            lines[side] += [f"{home}:{number}: {line.strip()}" for number, line in found if re.search(words, line)]
    assert lines["outside"] == []
    # A pattern that matches nowhere tests nothing.
    assert lines["inside"] or re.search(words, (HOME / "config/registry.py").read_text())


def test_the_errors_by_which_an_engine_reports_a_lost_rank_are_known_by_its_entry_alone():
    errors = [entry.peer_errors for entry in REGISTRY.values()]
    names = {name for each in errors for name in (*each.types, *each.general_types)}
    assert {"DistNetworkError", "HorovodInternalError"} <= names
    rest = {name: path.read_text() for name, path in MODULES.items() if not name.startswith("distributed.backends.")}
    del rest["distributed.config.registry"]
    assert [(name, error) for name, text in rest.items() for error in names if re.search(rf"\b{error}\b", text)] == []


# Modules outside of `backends/` that belong to one engine, and the package of that engine, which they may import.
FACES = {"distributed.comm": "_torch", "distributed.gradient_checkpointing": "_torch", "distributed.tuning.ray": "_ray"}


def test_only_backends_and_the_faces_of_an_engine_import_its_package():
    others = [name for name in MODULES if not name.startswith("distributed.backends.")]
    pairs = {(name, each) for name in others for each in imports_of(name) if ".backends._" in each}
    allowed = {
        (name, each)
        for face, package in FACES.items()
        for name, each in pairs
        if f"{name}.".startswith(f"{face}.") and each.startswith(f"distributed.backends.{package}.")
    }
    assert len({name for name, _ in allowed}) >= len(FACES)
    assert pairs - allowed == set()
