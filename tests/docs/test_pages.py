"""The pages under docs/: their samples run, their links lead somewhere, and every backend's page names its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from distributed.cli.__main__ import VERBS
from distributed.config.registry import REGISTRY, option_class
from tests.cli.test_help import parse
from tests.conftest import needs_backend

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# Pages to learn from, which run from top to bottom in test_learning_pages.py. The site has an index.md in each directory.
LEARNING_PLACES = ("tutorials", "concepts", "coming-from", "start", "troubleshooting", "faq", "glossary")
LEARNING = [page for page in PAGES if page.relative_to(ROOT / "docs").with_suffix("").parts[0] in LEARNING_PLACES]
LEARNING = [page for page in LEARNING if page.name != "index.md"]
# Pages that lead to others, pages made from the code and from files elsewhere, and pages whose samples other tests run: test_readme.py
# and test_learning_pages.py.
LEADING = [page for page in PAGES if page.name in ("index.md", "how-to.md", "project.md")]
MADE = [page for page in PAGES if page.parent.name in ("reference", "project")]
ELSEWHERE = [ROOT / "docs" / "training.md", ROOT / "docs" / "index.md", *LEARNING]
PYTHON = "python -m distributed"
CONSOLE_SCRIPT = "distributed "  # the same program as `python -m distributed.cli`


def blocks(page):
    """(language, what stands beside it, text) of each sample. `python NAME.py` is a file that a command of the page needs, and so
    is `yaml NAME.yaml`."""
    return re.findall(r"^```(\w+) ?([\w.-]*)\n(.*?)^```$", page.read_text(), re.M | re.S)


def name_of(page):
    return page.relative_to(ROOT / "docs").with_suffix("").as_posix()


def needed(page):
    if page.parent.name == "backends":
        needs_backend(page.stem)
    if page.stem in ("tuning", "ray"):
        needs_backend("ray")


# Commands that work on what other commands of their page have made, and why they cannot run by themselves. They are parsed only.
NEEDING = {
    "export-1": "it begins with the weights of the command before it", "export-2": "it exports the run of the first command",
    "init-1": "it trains the project that the command before it writes",
    "init-2": "it lists the runs of the command before it",
    "init-3": "it writes a file for the script of the first command", "init-4": "it trains the script of the first command",
    "reliability-0": "it reads the run of the Python sample after it",
    "report-2": "it reads the run of the first command", "report-3": "it reads the runs of the first two commands",
    "runs-3": "it compares the runs of the first two commands", "runs-8": "it compares the runs of the first two commands",
    "runs-9": "it compares the runs of the first two commands",
}  # fmt: skip


# Long commands for `make test-full`. test_parity.py runs this one with other arguments.
LONG = ("parity-0",)


def sample(page, code, number):
    name = f"{name_of(page)}-{number}"
    return pytest.param(page, code, id=name, marks=pytest.mark.full if name in LONG else ())


SCRIPTS = [
    sample(page, code, number)
    for page in PAGES
    if page not in ELSEWHERE
    for number, (language, beside, code) in enumerate(blocks(page))
    if (language, beside) == ("python", "")
]
ALL_COMMANDS = [
    sample(page, re.sub(f"^{CONSOLE_SCRIPT}", f"{PYTHON}.cli ", line), number)
    for page in PAGES
    if page not in ELSEWHERE
    for number, line in enumerate(
        line for language, _, code in blocks(page) if language == "bash" for line in code.splitlines()
    )
    if line.startswith((PYTHON, CONSOLE_SCRIPT)) or re.match(r"python \w+\.py\b", line)
]
COMMANDS = [each for each in ALL_COMMANDS if each.id not in NEEDING]
PARSED = [each for each in ALL_COMMANDS if each.id in NEEDING]
# Pages whose commands need each other, or the Python sample of their page.
IN_ORDER = [ROOT / "docs" / f"{name}.md" for name in ("export", "init", "report", "runs")]
AFTER_SAMPLE = [ROOT / "docs" / "reliability.md"]
# Part of a training that cannot be a sample of one machine -> why. Other tests have the same commands with what they need.
ELSEWHERE_ONLY = {
    "s3://": "it needs a bucket", "--rank ": "it waits for the other command", "--num-nodes ": "it waits for other nodes",
    "--address ": "it needs a cluster of Ray",
}  # fmt: skip
TRAININGS = [
    each
    for each in COMMANDS
    if each.values[1].startswith(f"{PYTHON}.cli train ") and "--dry-run" not in each.values[1]
    and not any(part in each.values[1] for part in ELSEWHERE_ONLY)
]  # fmt: skip


def write_files(page, directory):
    """Write the files with Python and YAML that the page names into a directory, beside the examples."""
    (directory / "examples").symlink_to(ROOT / "examples")
    for language, beside, code in blocks(page):
        if language in ("python", "yaml") and "." in beside:
            (directory / beside).write_text(code)


def test_a_command_of_the_page_runs_each_script_that_it_shows():
    shown = {
        (page, beside)
        for page in PAGES
        if page not in ELSEWHERE
        for _, beside, _ in blocks(page)
        if beside.endswith(".py")
    }
    run = {(each.values[0], word) for each in ALL_COMMANDS for word in shlex.split(each.values[1])}
    assert shown and {(name_of(page), script) for page, script in shown - run} == set()


def test_the_commands_that_need_others_exist():
    assert NEEDING.keys() == {each.id for each in PARSED}


@pytest.mark.docs
@pytest.mark.parametrize(("page", "code"), SCRIPTS)
def test_python_sample_runs(page, code, run_python, tmp_path):
    needed(page)
    (tmp_path / "sample.py").write_text(code)
    done = run_python(["sample.py"], timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.output


@pytest.mark.docs
@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_command_line_sample_works(page, command, run_python, tmp_path):
    """`train` is understood, which is all that can be known within a second; the others run."""
    needed(page)
    write_files(page, tmp_path)
    arguments = shlex.split(command)[1:]
    if arguments[1:3] == ["distributed.cli", "train"]:
        arguments.insert(3, "--dry-run")
    done = run_python(arguments, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.output


def short(command):
    """Return the arguments of Python for a command. The training of a script that is not on the page ends after two updates."""
    arguments = shlex.split(command)[1:]
    if arguments[1:3] == ["distributed.cli", "train"] and "/" in arguments[4] and "--max-steps" not in arguments:
        arguments[3:3] = ["--max-steps", "2"]
    return arguments


@pytest.mark.full
@pytest.mark.parametrize(("page", "command"), TRAININGS)
def test_command_line_sample_trains(page, command, run_python, tmp_path):
    needed(page)
    write_files(page, tmp_path)
    done = run_python(short(command), timeout=240, cwd=tmp_path)
    assert done.returncode == 0 and re.search(r"^(finished|stopped .*) at step ", done.stdout, re.M), done.output


@pytest.mark.full
@pytest.mark.parametrize("page", IN_ORDER, ids=name_of)
def test_commands_that_need_others_run_after_them(page, run_python, tmp_path):
    write_files(page, tmp_path)
    for each in ALL_COMMANDS:
        if each.values[0] == page:
            done = run_python(short(each.values[1]), timeout=240, cwd=tmp_path)
            assert done.returncode == 0, f"{each.values[1]}\n{done.output}"


@pytest.mark.docs
@pytest.mark.parametrize("page", AFTER_SAMPLE, ids=name_of)
def test_commands_that_need_a_sample_run_after_it(page, run_python, tmp_path):
    ((_, _, code),) = [block for block in blocks(page) if block[:2] == ("python", "")]
    (tmp_path / "sample.py").write_text(code)
    commands = [shlex.split(each.values[1])[1:] for each in ALL_COMMANDS if each.values[0] == page]
    for arguments in (["sample.py"], *commands):
        done = run_python(arguments, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, f"{arguments}\n{done.output}"


def test_every_command_that_needs_others_runs_after_them():
    assert {each.values[0] for each in PARSED} <= {*IN_ORDER, *AFTER_SAMPLE}


def test_every_reason_for_not_training_has_a_command():
    assert [part for part in ELSEWHERE_ONLY if not any(part in each.values[1] for each in COMMANDS)] == []


@pytest.mark.parametrize(("page", "command"), PARSED)
def test_command_line_sample_that_needs_others_parses(page, command):
    verb, *arguments = shlex.split(command.removeprefix(f"{PYTHON}.cli "))
    parse(verb, arguments)


def shown_only(page):
    """Return the commands of this package in samples that are only shown, since they need a cluster or a GPU."""
    samples = re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(), re.M | re.S)
    lines = "".join(text for language, text in samples if language in ("text", "")).replace("\\\n", " ").splitlines()
    found = [re.search(r"(?<!\S)(?:python3? -m distributed\.cli|distributed) ([a-z-]+) (.*)", line) for line in lines]
    return [(each[1], each[2].partition(" #")[0]) for each in found if each and each[1] in VERBS]


SHOWN = [
    pytest.param(verb, words, id=f"{name_of(page)}-{i}")
    for page in PAGES
    for i, (verb, words) in enumerate(shown_only(page))
]


@pytest.mark.parametrize(("verb", "words"), SHOWN)
def test_a_command_that_is_only_shown_parses(verb, words):
    parse(verb, shlex.split(words))


def test_every_page_has_samples_of_both_kinds():
    for page in PAGES:
        if page not in (*LEADING, *MADE, *LEARNING):
            kinds = {language for language, _, _ in blocks(page)}
            assert {"python", "bash"} <= kinds, page


def test_every_backend_has_a_page_that_names_all_its_options_and_no_others():
    assert {page.stem for page in PAGES if page.parent.name == "backends"} == set(REGISTRY)
    for entry in REGISTRY.values():
        text = (ROOT / "docs" / "backends" / f"{entry.name}.md").read_text()
        rows = re.findall(r"^\| `([\w.]+)`", text, re.M)
        assert rows == [f"{entry.group}.{option}" for option in option_class(entry.group).__dataclass_fields__], (
            entry.name
        )


def prose(page):
    """Return a page without its samples."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def anchors(page):
    """Return the anchors of the headings, as GitHub names them."""
    return {
        re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in re.findall(r"^#+ (.+)$", prose(page), re.M)
    }


def test_the_front_page_shows_samples_of_the_readme():
    readme = blocks(ROOT / "README.md")
    shown = [block for block in blocks(ROOT / "docs" / "index.md") if block[0] in ("python", "bash")]
    assert {language for language, _, _ in shown} == {"python", "bash"}
    assert all(block in readme for block in shown)


@pytest.mark.parametrize(
    "page",
    [*(page for page in PAGES if page.parent.name != "project"), ROOT / "README.md", ROOT / "docker" / "README.md"],
    ids=lambda page: page.parent.name + "-" + page.stem,
)
def test_no_heading_stands_twice(page):
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    assert headings and len(headings) == len(set(headings))


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_no_link_leads_nowhere(page):
    """Between pages, and to the files of the repository. test_site.py checks the site, which leads to every page."""
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", prose(page)):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or file.suffix != ".md" or file.resolve() in MADE or anchor in anchors(file), (target, anchor)
    addresses = re.findall(r"\]\((\w+:[^)]*)\)", page.read_text())
    assert [each for each in addresses if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[^\s<>]*)?", each)] == []
