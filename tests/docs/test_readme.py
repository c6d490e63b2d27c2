"""The samples of README.md and of docs/training.md run as they stand, one after another where they need each other."""

from __future__ import annotations

import itertools
import re
import shlex
import warnings
from pathlib import Path

import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [
    block
    for page in ("README.md", "docs/training.md")
    for block in re.findall(r"^```(\S+)(?: (\S+))?\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
]
SCRIPTS = [code for language, kind, code in BLOCKS if (language, kind) == ("python", "")]
CELLS = [code for language, kind, code in BLOCKS if (language, kind) == ("python", "notebook")]
COMMANDS = [
    [line for line in code.splitlines() if line.startswith("python -m distributed.cli ")]
    for language, _, code in BLOCKS
    if language == "bash"
]
RUN = (" doctor", " report ", " checkpoint ", " backends")
COMPARED = [lines for lines in COMMANDS if any(" parity " in line for line in lines)]
EXECUTED = [lines for lines in COMMANDS if any(verb in line for line in lines for verb in RUN)]
UNDERSTOOD = [
    line for lines in COMMANDS if lines not in [*EXECUTED, *COMPARED] for line in lines
]  # their runs take minutes


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_all_three_ways_have_a_sample():
    assert len(UNDERSTOOD) >= 1
    assert len(SCRIPTS) >= 1
    assert len(CELLS) >= 1


@pytest.mark.parametrize("code", SCRIPTS, ids=lambda code: re.search(r"\w*Trainer\(", code).group())
def test_python_sample_runs(code, run_python, tmp_path):
    (tmp_path / "sample.py").write_text(code)

    done = run_python(["sample.py"], timeout=180, cwd=tmp_path)

    assert done.returncode == 0, done.output


@pytest.mark.full  # test_learning_pages.py runs the notebook of a tutorial, and test_notebooks.py those of examples
@pytest.mark.parametrize("code", CELLS, ids=["notebook"])
def test_notebook_sample_runs(code, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the notebook tools, at import
        import nbformat
        from nbclient import NotebookClient
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])

    NotebookClient(notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()

    errors = [output for output in notebook.cells[0].outputs if output.output_type == "error"]
    assert errors == []


@pytest.mark.parametrize("command", UNDERSTOOD)
def test_command_line_sample_is_understood(command, run_cli, tmp_path):
    _, _, _, *arguments = shlex.split(command)
    arguments.insert(1, "--dry-run")

    done = run_cli(arguments, cwd=ROOT)

    assert done.returncode == 0, done.output
    assert "global_batch_size" in done.stdout


@pytest.mark.parametrize("command", UNDERSTOOD)
def test_command_line_sample_trains(command, run_cli, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    _, _, _, *arguments = shlex.split(command)
    arguments[1:1] = ["--max-steps", "2"]

    done = run_cli(arguments, timeout=240, cwd=tmp_path)

    assert done.returncode == 0 and re.search(r"^(finished|stopped .*) at step 2\b", done.stdout, re.M), done.output


def test_command_line_samples_run_one_after_another(run_cli, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said = {}
    for command in itertools.chain(*EXECUTED):
        _, _, _, *arguments = shlex.split(command)
        done = run_cli(arguments, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.output
        said[" ".join(arguments[:2])] = done.stdout

    assert said.keys() == {
        "doctor", "train --script", "report runs/digits", "checkpoint list", "checkpoint verify", "checkpoint export", "backends", "backends fsdp",
    }  # fmt: skip
    assert "fsdp.NAME" in said["backends fsdp"]
    assert [line.split()[1] for line in said["checkpoint list"].splitlines()[1:]] == ["1", "2"]  # epochs
    assert said["checkpoint verify"].endswith("all verified\n")
    assert len(load_file(tmp_path / "digits.safetensors")) == 8


@pytest.mark.full  # test_parity.py compares backends by default
def test_the_sample_of_parity_agrees(run_cli, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ((command,),) = COMPARED
    done = run_cli(shlex.split(command)[3:], timeout=120, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("all agree\n"), done.output
