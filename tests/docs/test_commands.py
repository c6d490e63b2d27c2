"""Every command of the documentation is one that our command line understands, in whatever fence it stands.

Other tests run those that can run on one machine in seconds. The rest, which need a cluster, a bucket, a GPU or a run of the
reader, are only parsed here: a flag that is renamed, and a value that a setting refuses, fail.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex

import pytest

import distributed
from distributed.config.registry import REGISTRY
from distributed.config.settings import DistributedConfig
from distributed.launcher import scripts
from distributed.testing import __main__ as testing
from tests.cli.test_help import parse
from tests.docs.test_pages import PAGES, ROOT

TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docker" / "README.md"]
STARTERS = ("python", "python3", "torchrun", "srun", "mpirun", "horovodrun")
IMAGE = "distributed-torch"  # its entry point is our command line: docker/README.md
MODULES = {"distributed.cli", "distributed.launcher", "distributed.testing"}


def fences(page):
    """Return (language, text) of every sample of a page, also of those in lists."""
    return re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", page.read_text(), re.M | re.S)


def command_of(line):
    """Return (module, arguments) of a line of a shell that runs this package, else None."""
    line = re.sub(r"^(\$ )?(\w+=\S* )*", "", line.strip())
    if not re.match(rf"({'|'.join(STARTERS)}|distributed|docker run) .*", line):
        return None
    words = shlex.split(line, comments=True)
    if words[0] == "distributed":
        return "distributed.cli", words[1:]
    if words[0] == "docker":
        return ("distributed.cli", words[words.index(IMAGE) + 1 :]) if IMAGE in words else None
    for place, (flag, module) in enumerate(itertools.pairwise(words)):
        if flag == "-m" and module.partition(".")[0] == "distributed":
            return module, words[place + 2 :]
    return None


def lines_of(text):
    return text.replace("\\\n", " ").splitlines()


COMMANDS = [
    pytest.param(*found, id=f"{page.relative_to(ROOT).with_suffix('')}: {found[0].partition('.')[2]} {' '.join(found[1])}"[:120])
    for page in TEXTS
    for language, text in fences(page)
    if language not in ("python", "diff", "yaml", "toml")
    for line in lines_of(text)
    if (found := command_of(line))
]  # fmt: skip


def understand(module, arguments, monkeypatch):
    """Parse the arguments of one of our programs. Raises if it would refuse them."""
    assert module in MODULES
    if module == "distributed.launcher":
        _, script, _ = scripts.parse(arguments)
        assert script.endswith(".py")
    elif module == "distributed.testing":
        monkeypatch.setattr(testing, "_run", lambda adapters, *_, **__: 0 if adapters else 1)
        monkeypatch.setattr(testing.Adapter, "check", lambda self: None)  # libraries that are not here
        assert testing.main(arguments) == 0
    else:
        parse(arguments[0], arguments[1:])


@pytest.mark.parametrize(("module", "arguments"), COMMANDS)
def test_a_command_is_understood(module, arguments, monkeypatch):
    understand(module, arguments, monkeypatch)


def test_commands_are_found_in_every_kind_of_sample():
    words = [" ".join(each.values[1]) for each in COMMANDS]

    assert len(words) > 120
    assert {each.values[0] for each in COMMANDS} == MODULES
    for part in (
        "--address head:6379",
        "submit status RUN",
        "mlflow-sync ",
        "ray.cpus_per_worker=0.5",
        "horovod:1,2,3",
    ):
        assert any(part in each for each in words), part


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("python -m distributed.cli runs --limit 5  # five", ("distributed.cli", ["runs", "--limit", "5"])),
        ("$ distributed why runs/a", ("distributed.cli", ["why", "runs/a"])),
        ("TOKEN=x python -m distributed.launcher a.py", ("distributed.launcher", ["a.py"])),
        ("torchrun --nproc-per-node 2 -m distributed.cli train", ("distributed.cli", ["train"])),
        ("mpirun -np 2 python -m distributed.cli doctor", ("distributed.cli", ["doctor"])),
        ("srun -N 2 python3 -m distributed.cli doctor", ("distributed.cli", ["doctor"])),
        ("docker run --rm distributed-torch backends", ("distributed.cli", ["backends"])),
        ("python train.py", None),
        ("python -m pytest tests", None),
        ("distributed: it's a word", None),
        ("ray start --head", None),
    ],
)
def test_the_commands_of_these_tests_are_ours(line, found):
    assert command_of(line) == found


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("distributed.cli", "train --script a.py --nproc-per-nod 2"),
        ("distributed.cli", "train --script a.py --backend fsd"),
        ("distributed.cli", "train --script a.py --max-steps two"),
        ("distributed.cli", "train --script a.py --set ray.cpus_per_work=1"),
        ("distributed.cli", "train --script a.py --set mixed_precision=fp17"),
        ("distributed.cli", "tune --script a.py --search-space s.yaml --epochs zero"),
        ("distributed.cli", "tune --script a.py --search-space s.yaml --scheduler ash"),
        ("distributed.cli", "submit slurm --script a.py --nodes 2"),
        ("distributed.cli", "submit ray --script a.py --gpus-per-node -1"),
        ("distributed.cli", "parity --script a.py --backends pytorch-dpp"),
        ("distributed.cli", "parity --script a.py --set ray.cpus=1"),
        ("distributed.cli", "export runs/a --format onx"),
        ("distributed.launcher", "a.py --nproc_per_node=two"),
        ("distributed.launcher", "--nprocs 2 a.py"),
        ("distributed.testing", "fsd:1,2"),
        ("distributed.testing", "fsdp:1,2 --checkpoint-table"),
        ("distributed.wrong", "a.py"),
    ],
)
def test_a_wrong_command_is_not_understood(module, text, monkeypatch, capsys):
    with pytest.raises((Exception, SystemExit)):
        understand(module, shlex.split(text), monkeypatch)


def trees(page):
    """Yield the code of a page that no test runs: text that is Python and calls something."""
    for language, text in fences(page):
        if language in ("", "text"):
            try:
                tree = ast.parse(text)
            except SyntaxError:
                continue
            if any(isinstance(node, ast.Call) for node in ast.walk(tree)):
                yield tree


def literals(call):
    return {
        each.arg: ast.literal_eval(each.value)
        for each in call.keywords
        if isinstance(each.value, ast.Constant | ast.Dict)
    }


def test_code_that_needs_a_cluster_names_settings_that_exist():
    calls = [node for page in TEXTS for tree in trees(page) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainers = [call for call in calls if ast.unparse(call.func).endswith("Trainer")]

    for call in trainers:
        assert hasattr(distributed, ast.unparse(call.func))
        settings = literals(call)
        assert settings.get("backend", "single") in REGISTRY
        DistributedConfig(**settings)
    assert trainers
    with pytest.raises(distributed.ConfigError):
        DistributedConfig(**literals(ast.parse('Trainer(model, adress="ray://head:10001")').body[0].value))


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_and_benchmarks_that_a_page_names_exist(page):
    named = set(re.findall(r"(?<![\w/])(?:tests|benchmarks)/[\w/]+\.py", page.read_text()))
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]


def test_a_word_that_selects_tests_selects_some():
    rows = re.findall(r"`pytest -m '' (\S+\.py) -k (\w+)`", (ROOT / "docs" / "reliability.md").read_text())
    assert rows
    for file, word in rows:
        assert re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(), re.M), (file, word)
