"""Where things are: few rooms, each with a sentence of its own, and no circle of imports anywhere."""

import ast
import graphlib
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import distributed

HOME = Path(distributed.__file__).parent
MODULES = {
    ".".join(path.relative_to(HOME.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in HOME.rglob("*.py")
}
MOST_ROOMS = 22


def imports_of(name):
    """The modules of the package that `name` imports at run time: at the top and inside functions, not for types alone."""
    found, waiting = set(), [ast.parse(MODULES[name].read_text())]
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


def test_there_are_few_rooms_and_each_says_what_belongs_there():
    modules = [path for path in HOME.glob("*.py") if path.name != "__init__.py"]
    rooms = modules + [path.parent for path in HOME.glob("*/__init__.py")]  # not what an older checkout left behind
    assert len(rooms) <= MOST_ROOMS, sorted(room.name for room in rooms)
    files = [room / "__init__.py" if room.is_dir() else room for room in rooms]
    sentences = defaultdict(list)
    for file in files:
        sentences[(ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]].append(file)
    assert all(sentence.endswith(".") and len(same) == 1 for sentence, same in sentences.items()), sentences


def test_the_picture_is_what_the_code_says():
    script = HOME.parent / "scripts" / "draw_rooms.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
