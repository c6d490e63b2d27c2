"""The project's own files agree with each other."""

from __future__ import annotations

import ast
import io
import os
import pkgutil
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import distributed
from distributed.config.registry import REGISTRY

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_names() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    return {normal(re.match(r"[\w.-]+", line).group()) for line in lines} - {"distributed-trainer"}


def test_everything_required_is_pinned_exactly():
    pinned = {normal(line.partition("==")[0]) for line in PINS}

    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in PINS)
    assert requirement_names() - pinned == set()
    assert "torch==2.13.0" in PINS


def test_lower_bounds_are_no_later_than_what_the_tests_run_with():
    pins = {normal(name): Version(version) for name, version in (line.split("==") for line in PINS)}
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    bounds = [
        re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)", line) for line in lines if "distributed-trainer" not in line
    ]

    assert None not in bounds
    assert [bound[0] for bound in bounds if Version(bound[2]) > pins[normal(bound[1])]] == []


def test_what_builds_the_package_is_pinned_and_bounded_as_well():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pins = {normal(name): Version(version) for name, version in (line.split("==") for line in PINS)}
    bounds = [re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in requires]
    assert [bound[0] for bound in bounds if Version(bound[2]) > pins[normal(bound[1])]] == []


def public_names() -> dict[str, object]:
    """Return the names in tests/data/public_names.txt, in full, with what each of them is."""
    names = (ROOT / "tests/data/public_names.txt").read_text().split()
    full = [name if "." in name else f"distributed.{name}" for name in names]
    return {name: pkgutil.resolve_name(":".join(name.rsplit(".", 1))) for name in full}


def test_no_public_name_disappears():
    """tests/data/public_names.txt only grows. A name that is renamed stays as an alias that warns (CONTRIBUTING.md, "Public names")."""
    names = public_names()
    pages = (page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    on_pages = {name for page in pages for name in re.findall(r"^\.\. auto[a-z]+:: ([\w.]+)", page, re.M)}
    assert len(names) > 80 and names.keys() == on_pages, "add new names to the file and to a page of docs/reference"
    assert {f"distributed.{name}" for name in distributed.__all__} == {name for name in names if name.count(".") == 1}


def imports_of_samples(page: str) -> Iterator[tuple[str, str]]:
    """Yield (module of the package, name) for each name that the samples of a page import."""
    for sample in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        for node in ast.walk(ast.parse(sample)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "distributed":
                yield from ((str(node.module), each.name) for each in node.names)


def test_samples_import_public_names_only():
    public = list(public_names().values())
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "architecture.md"]
    imported = {each for path in (ROOT / "README.md", *pages) for each in imports_of_samples(path.read_text())}
    assert len(imported) > 30
    private = [each for each in imported if not any(pkgutil.resolve_name(":".join(each)) is other for other in public)]
    assert private == []


def test_users_are_not_pinned():
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]

    assert [line for line in lines if "==" in line or "<" in line] == []


def test_torch_is_not_needed_to_install():
    assert not any(line.startswith("torch") for line in PROJECT["dependencies"])
    assert any(line.startswith("torch") for line in PROJECT["optional-dependencies"]["torch"])


def test_the_install_command_of_a_backend_brings_all_that_it_needs():
    """torch too, whatever the engine: the launcher is its elastic agent."""
    extras = PROJECT["optional-dependencies"]
    for entry in REGISTRY.values():
        assert "torch" in entry.requires, entry.name
        if extra := re.search(r"\[([\w-]+)\]", entry.install):
            lines = [
                *extras[extra.group(1)],
                *(extras["torch"] if "distributed-trainer[torch]" in extras[extra.group(1)] else ()),
            ]
            brought = {re.match(r"[\w-]+", line).group() for line in lines}
            assert set(entry.requires) <= brought, (entry.name, brought)


# "Workaround (LIBRARY VERSION, OWNER/REPOSITORY#NUMBER; may go when CONDITION)", or "no upstream issue known" for the number.
WORKAROUND = re.compile(
    r"Workaround \(\w[\w .]* \d+\.\d[\w.]*, (?:[\w.-]+/[\w.-]+#\d+|no upstream issue known)[^();]*; [^();]*\bmay go when [^()]+\)"
)


def prose_of(text: str) -> str:
    """Return the lines of `text` as one line, without the signs of comments."""
    return " ".join(re.sub(r"^\s*#", "", line).strip() for line in text.splitlines())


def unnamed_workarounds(text: str) -> list[str]:
    """Words of `text` about workarounds that do not name a version, an issue and the condition under which each may go."""
    return re.findall(
        r"(?i)\bworkarounds?\b.{0,60}|\b(?:can|may) go (?:when|once|if)\b.{0,60}", WORKAROUND.sub("", prose_of(text))
    )


# A version of a library, such as "torch 2.13", "Ray Tune (2.60)", "torch's Adafactor (2.13)" or "(2.13)" alone.
VERSION = re.compile(
    r"(?i)\b(?:torch|torchmetrics|ray|keras|tensorflow|deepspeed|horovod|mlflow|python|gloo)(?:'s)?(?: (?!before)[a-z]+)? \(?\d+\.\d+"
    r"|\(\d+\.\d+[\d.]*\)"
)
# Files that state versions where nothing is worked around -> how often: what a library cannot do, so that a setting is refused,
# texts of messages that are recognised, and the version that is built.
STATED = {
    "distributed/backends/deepspeed.py": 2, "distributed/backends/tensorflow.py": 1, "distributed/backends/torch_base.py": 1,
    "distributed/config/registry.py": 2, "distributed/backends/horovod.py": 1, "scripts/horovod_cxx.sh": 1,
}  # fmt: skip


def comments_of(path: Path) -> str:
    """Return the comments and docstrings of a file."""
    text = path.read_text()
    if path.suffix != ".py":
        return prose_of("\n".join(line for line in text.splitlines() if line.lstrip().startswith("#")))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return prose_of("\n".join([*comments, *docs]))


def stated_versions(prose: str) -> list[str]:
    """Words of `prose` that name a version of a library outside of a workaround and the sentence after it."""
    return VERSION.findall(re.sub(WORKAROUND.pattern + r"(?::.*?(?=\. |$))?", "", prose))


def files_with_workarounds() -> list[Path]:
    patterns = ("distributed/**/*.py", "scripts/*.*", "benchmarks/*.py", "*.py", "Makefile", "tests/conftest.py")
    return [path for pattern in patterns for path in ROOT.glob(pattern)]


def test_every_workaround_names_version_issue_and_when_it_may_go():
    texts = {path: path.read_text() for path in files_with_workarounds()}

    assert {str(path): found for path, text in texts.items() if (found := unnamed_workarounds(text))} == {}
    assert sum(len(WORKAROUND.findall(re.sub(r"\s+(?:# )?", " ", text))) for text in texts.values()) > 50


def test_a_comment_that_names_a_version_of_a_library_is_about_a_workaround():
    found = {str(path.relative_to(ROOT)): stated_versions(comments_of(path)) for path in files_with_workarounds()}

    assert {name: words for name, words in found.items() if len(words) != STATED.get(name, 0)} == {}


@pytest.mark.parametrize(
    ("prose", "is_found"),
    [
        ("Ray gives up too early (2.60).", True),
        ("torch's Adafactor (2.13) fails on them.", True),
        ("Silence the lines of MLflow (3.17) about its tables.", True),
        (
            "Workaround (torch 2.13, pytorch/pytorch#1; may go when it is mended): torch 2.13 fails. Here it is not used.",
            False,
        ),
        ("Workaround (torch 2.13, pytorch/pytorch#1; may go when it is mended): it fails. torch 2.12 does too.", True),
        ("torch before 2.13 has the function under its old name.", False),
    ],
)
def test_a_version_outside_of_a_workaround_is_found(prose, is_found):
    assert bool(stated_versions(prose)) == is_found


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("# Workaround (torch 2.13, pytorch/pytorch#1; may go when\n# it is mended): it fails.", True),
        ("Workaround (Ray 2.60, no upstream issue known; the tries may go when Ray waits): it leaves.", True),
        ("Workaround (torch, pytorch/pytorch#1; may go when it is mended): it fails.", False),
        ("Workaround (torch 2.13, pytorch issue 1; may go when it is mended): it fails.", False),
        ("Workaround (torch 2.13, pytorch/pytorch#1): it fails.", False),
        ("A workaround for torch 2.13.", False),
        ("It fails (torch 2.13). This can go when it is mended.", False),
    ],
)
def test_a_workaround_without_a_name_is_found(text, is_named):
    assert (unnamed_workarounds(text) == []) == is_named


def test_changelog_names_this_version():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M).group(1)

    assert first == distributed.__version__


def test_continuous_integration_skips_no_backend():
    (line,) = re.findall(r"^export REQUIRE_BACKENDS=(\S+)", (ROOT / ".ci" / "run").read_text(), re.M)

    assert line.split(",") == list(REGISTRY)


WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def test_the_workflow_fits_its_schema(run_python):
    pytest.importorskip("check_jsonschema")
    check = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]

    done = run_python([*check, str(WORKFLOW)])

    assert done.returncode == 0, done.output


def test_the_workflow_runs_all_checks_on_one_python_and_the_unit_tests_on_later_ones():
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    check, unit = jobs["check"], jobs["unit"]
    script = (ROOT / ".ci" / "run").read_text()

    assert check["container"]["image"].startswith("python:3.11-")
    assert re.search(r"^exec (make .*)", script, re.M)[1] in [step.get("run") for step in check["steps"]]
    assert [step["if"] for step in check["steps"] if step.get("run") == "make test-full"] == [
        "github.event_name == 'schedule'"
    ]
    assert check["env"]["REQUIRE_BACKENDS"] == re.search(r"REQUIRE_BACKENDS=(\S+)", script).group(1)
    assert unit["strategy"]["matrix"]["python"] == ["3.12", "3.13"]
    assert unit["steps"][-1]["run"].endswith("tests/unit")


TRAIN = "train --script examples/train.py --backend pytorch-ddp --nproc-per-node 2"


@pytest.fixture
def plan(tmp_path):
    """Return what `make TARGET` would run, as a function of the target, in a copy of the files that the rules name."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / ".venv").mkdir()
    env = {"PATH": os.environ["PATH"]}  # without what an outer make passes on

    def run(target: str) -> str:
        command = ["make", "-n", target]
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    return run


def installs(text: str) -> list[str]:
    """Return the extras of each `pip install -e`."""
    return re.findall(r"pip install .* -e '\.\[([\w,-]+)\]'", text)


def test_the_demo_installs_what_it_needs_and_the_rest_comes_with_other_targets(plan, tmp_path):
    assert installs(plan("demo")) == ["torch,plot,report,examples"]
    (tmp_path / ".venv" / ".demo").touch()

    assert installs(plan("demo")) == []
    assert TRAIN in plan("demo")
    assert all(installs(plan(target)) == ["all"] for target in ("test", "check", "format", "bench"))
    assert installs(plan("docs")) == ["docs"]


@pytest.mark.parametrize("moved", ["constraints.txt", "pyproject.toml"])
def test_a_moved_pin_or_requirement_installs_again(plan, tmp_path, moved):
    stamps = [tmp_path / ".venv" / name for name in (".demo", ".installed")]
    for stamp in stamps:
        stamp.touch()
    assert [installs(plan(target)) for target in ("demo", "test")] == [[], []]

    later = stamps[1].stat().st_mtime + 10
    os.utime(tmp_path / moved, (later, later))

    assert [installs(plan(target)) for target in ("demo", "test")] == [["torch,plot,report,examples"], ["all"]]


def test_the_full_installation_serves_the_demo_and_the_site(plan, tmp_path):
    made = re.findall(r"^touch (.+)$", plan("test"), re.M)[0].split()
    for name in made:
        (tmp_path / name).touch()

    assert {".venv/.demo", ".venv/.docs", ".venv/.installed"} == set(made)
    assert [installs(plan(target)) for target in ("demo", "docs", "test")] == [[], [], []]
