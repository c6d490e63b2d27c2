"""`distributed init` writes projects that run as they are: the examples in examples/projects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed.cli import init
from distributed.cli.__main__ import run
from distributed.config.merging import read_config_file
from distributed.errors import ConfigError
from tests.conftest import needs_backend

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ROOT / "examples" / "projects"
KINDS = list(init.KINDS)
# What the last line of a project says -> the least or largest value that a project which learned has.
LEARNED = {
    "image": (r"held-out accuracy ([\d.]+)", 0.9),
    "text": (r"perplexity ([\d.]+)", 10.0),
    "tabular": (r"area under the ROC curve ([\d.]+)", 0.97),
    "keras": (r"held-out accuracy ([\d.]+)", 0.95),
}
TORCH_BACKENDS = ("single", "pytorch-ddp", "fsdp", "deepspeed", "horovod", "ray")
SECOND = {"image": "single", "text": "fsdp", "tabular": "single", "keras": "single"}  # besides pytorch-ddp
ON_TENSORFLOW = [["tensorflow"], ["horovod", "--set", "horovod.keras_backend=tensorflow"]]


def needs_libraries(kind: str) -> None:
    for module in init.KINDS[kind][0]:
        pytest.importorskip(module, exc_type=ImportError)


def test_the_kinds_are_the_projects():
    assert sorted(KINDS) == sorted(path.name for path in PROJECTS.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_files_are_those_of_the_example(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "--kind", kind, "new/project"]) == 0
    for name in ("train.py", "config.yaml"):
        assert (tmp_path / "new/project" / name).read_bytes() == (PROJECTS / kind / name).read_bytes()
    said = capsys.readouterr().out
    assert "distributed train --script new/project/train.py --nproc-per-node 2" in said


def test_the_command_to_train_quotes_a_directory_with_spaces(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(["init", "my project"])
    assert "distributed train --script 'my project/train.py' --nproc-per-node 2" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_of_the_config_is_a_setting_that_is_explained_and_accepted(kind, tmp_path):
    text = (PROJECTS / kind / "config.yaml").read_text()
    settings = [line for line in text.splitlines() if re.match(r"(# )?\w+: \S", line)]
    assert len(settings) > 6 and text.startswith("# ")

    uncommented = "\n".join(line.removeprefix("# ") for line in settings)
    (tmp_path / "config.yaml").write_text(uncommented)

    assert set(read_config_file(tmp_path / "config.yaml").file) == set(yaml.safe_load(uncommented))
    assert "nproc_per_node" not in yaml.safe_load(text)  # a flag says on how many processes


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_short(kind):
    text = (PROJECTS / kind / "train.py").read_text()
    assert len(text.splitlines()) <= 60
    assert 'Path(__file__).with_name("config.yaml")' in text  # so that both ways of starting it read the file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", ["train.py", "config.yaml"])
def test_no_file_is_overwritten_and_none_is_written_beside_it(kind, there, tmp_path):
    (tmp_path / there).symlink_to("nowhere")
    with pytest.raises(ConfigError, match=rf"{there}' exists and is not overwritten"):
        run(["init", "--kind", kind, str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--kind", "imag"],
            r"--kind imag is unknown \(did you mean 'image'\?\): choose one of image, text, tabular, keras",
        ),
        (["train.py"], "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_an_error_of_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(ConfigError, match=message):
        run(["init", *words])


def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(init, "is_installed", lambda name: name not in ("PIL", "sklearn"))
    run(["init", "--kind", "image", str(tmp_path)])
    assert "not installed here: pillow, scikit-learn: run pip install pillow scikit-learn" in capsys.readouterr().out


def test_the_projects_are_in_the_wheel():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    installed = Path(init.__file__).with_name("projects")
    names = [f"{kind}/{name}" for kind in KINDS for name in init.FILES]
    included = {ROOT / source: ROOT / target for source, target in wheel["force-include"].items()}
    assert included == {PROJECTS / name: installed / name for name in names}  # and nothing that a local run left there
    assert all(source.is_file() for source in included)


def train(run_cli: Any, tmp_path: Path, kind: str, *flags: str, limit_s: float | None = None) -> str:
    """Write the project of `kind`, train it within `limit_s` seconds of CPU time, and return what it printed."""
    init.write_project(kind, tmp_path / kind)
    command = ["train", "--script", f"{kind}/train.py", *flags]
    # One thread, as workers have it: threads that wait for each other on a busy machine use up processor time.
    one_thread = {"OMP_NUM_THREADS": "1"}
    done = run_cli(command, timeout=240, cwd=tmp_path, env=one_thread, fresh=limit_s is not None)
    assert done.returncode == 0, done.output
    assert limit_s is None or done.within(limit_s)
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "pytorch-ddp") for kind in KINDS), *((kind, SECOND[kind]) for kind in KINDS)]
)
def test_a_project_begins_to_train_on_two_backends(kind, backend, run_cli, tmp_path):
    needs_libraries(kind)
    needs_backend(backend)
    processes = "1" if backend == "single" else "2"
    said = train(run_cli, tmp_path, kind, "--backend", backend, "--nproc-per-node", processes, "--max-steps", "4")
    assert re.search(r"^finished at step 4,", said, re.M) and re.search(LEARNED[kind][0], said), said


@pytest.mark.full
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_learns_on_every_backend_for_torch(kind, backend, run_cli, tmp_path):
    needs_libraries(kind)
    needs_backend(backend)
    if kind == "keras" and backend in ("fsdp", "deepspeed"):
        pytest.skip(f"{backend} trains no Keras models")
    check_learns(run_cli, tmp_path, kind, [backend], "1" if backend == "single" else "2")


@pytest.mark.full
@pytest.mark.parametrize("backend", ON_TENSORFLOW, ids=["tensorflow", "horovod"])
def test_the_keras_project_learns_on_tensorflow(backend, run_cli, tmp_path):
    needs_libraries("keras")
    needs_backend("tensorflow")
    needs_backend(backend[0])
    check_learns(run_cli, tmp_path, "keras", backend, "2")


def check_learns(run_cli: Any, tmp_path: Path, kind: str, backend: list[str], processes: str) -> None:
    """Train the project of `kind` within a minute of CPU time, and check that it has learned."""
    said = train(run_cli, tmp_path, kind, "--backend", *backend, "--nproc-per-node", processes, limit_s=60)
    pattern, bound = LEARNED[kind]
    found = float(re.search(pattern, said)[1])
    assert found <= bound if kind == "text" else found >= bound, said


def test_a_script_that_exists_gets_a_config_that_changes_nothing_until_a_line_is_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/run.py").write_text("from distributed import Trainer\nTrainer(None)\n")
    assert run(["init", "--script", "mine/run.py"]) == 0
    config = Path("mine/config.yaml")
    assert read_config_file(config).file == {}
    command = "distributed train --script mine/run.py --config mine/config.yaml"
    assert f"{command} --nproc-per-node 2" in capsys.readouterr().out and f"#   {command}\n" in config.read_text()
    settings = [line.removeprefix("# ") for line in config.read_text().splitlines() if re.match(r"# \w+: \S", line)]
    config.write_text("\n".join(settings))
    assert len(read_config_file(config).file) == len(settings) > 10  # every name is a setting, and every value is valid


def test_a_script_without_a_trainer_is_told_what_applies(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text("import torch\n")
    assert run(["init", "--script", "plain.py", "settings"]) == 0
    assert (
        "plain.py makes no Trainer and no Session" in capsys.readouterr().out and Path("settings/config.yaml").exists()
    )
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        run(["init", "--script", "plain.py", "settings"])
    with pytest.raises(ConfigError, match=r"--script 'gone.py' cannot be read \(No such file or directory\)"):
        run(["init", "--script", "gone.py"])
