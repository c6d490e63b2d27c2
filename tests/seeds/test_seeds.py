"""The code and shell samples of the documents that this project was asked from (README.md lists all of them), as they stand there
but for imports, data and sizes, and corrected where they were wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conformance.runs import FULL
from tests.conftest import Started, clean_environment, free_port, needs_backend
from tests.seeds import changes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLES = HERE / "samples"
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.timeout(600)


def environment(**more: str) -> dict[str, str]:
    """Where a shell sample finds `python`, and a port that is free; one thread for each process, as launchers set it."""
    return {"PATH": f"{BIN}:{os.environ['PATH']}", "PORT": str(free_port()), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def shell(start, tmp_path):
    """Run a shell sample beside the scripts that it names; returns it finished."""

    def run(sample, scripts):
        for name, script in {**scripts, "names.py": HERE / "names.py"}.items():
            shutil.copy(script, tmp_path / name)
        return start(["bash", str(SAMPLES / sample)], tmp_path, environment()).finish(150, grace=10)

    return run


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    """Run a driver with `command`; returns sample -> the error of each rank where it failed."""

    def run(command, driver):
        out = tmp_path_factory.mktemp("samples")
        (out / "train.py").symlink_to(HERE / driver)
        started = Started(
            [str(word) for word in command], out, out, clean_environment(**environment(SAMPLES_OUT=str(out)))
        )
        try:
            done = started.finish(200, grace=10)
        finally:
            started.kill()
        assert done.returncode == 0, done.output[-5000:]
        ranks = [json.loads((out / f"failed-{rank}.json").read_text()) for rank in (0, 1)]
        return {name: ranks[0].get(name) or ranks[1][name] for name in {**ranks[0], **ranks[1]}}

    return run


# ------------------------------------------------------------------ the list


def ran_here() -> set[str]:
    """The samples that a test or a driver of this directory names."""
    text = "".join(file.read_text() for file in HERE.glob("*.py"))
    return set(re.findall(r"\b00\d/\w+\.(?:py|sh)\b", text))


def test_every_sample_is_in_the_list_is_run_and_says_what_was_changed():
    files = {
        path.relative_to(SAMPLES).as_posix(): path for path in SAMPLES.rglob("*.*") if path.suffix in (".py", ".sh")
    }
    listed = set(re.findall(r"\]\(samples/(00\d/\w+\.(?:py|sh))\)", (HERE / "README.md").read_text()))

    assert files.keys() == listed == ran_here()
    for name, path in files.items():
        heads = [line for line in path.read_text().splitlines()[:2] if line.startswith(f'# {name[:3]}, "')]
        assert len(heads) == 1 and re.search(
            r"(Changed: .+|Corrected \(\d+ lines?\): .+|Nothing is changed)\.$", heads[0]
        ), name


@pytest.mark.skipif(not changes.DOCUMENTS.is_dir(), reason="the documents are not beside the checkout")
def test_a_sample_differs_from_its_document_only_as_it_says():
    compared = {" ".join(samples): changes.unlisted(*row, samples) for *row, samples in changes.rows()}

    assert {name: lines for name, (lines, number) in compared.items() if len(lines) != number} == {}


def test_the_list_names_every_sample_once_and_only_tests_that_exist():
    rows = re.findall(r"^\| (\d+) \|", (HERE / "README.md").read_text(), re.M)
    assert len(rows) > 100
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (HERE / "README.md").read_text()):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), (file, name)


# ------------------------------------------------------------------ many samples in one launch


def names_in(driver: str) -> list[str]:
    return re.findall(r'^    "((?:00\d/|corrected)[^"]+)":', (HERE / driver).read_text(), re.M)


@pytest.fixture(scope="module")
def world(drive):
    """Started by 001's workaround.sh, whose train.py is the driver."""
    return drive(["bash", SAMPLES / "001/workaround.sh"], "world.py")


@pytest.mark.docs
@pytest.mark.xdist_group("world")
@pytest.mark.parametrize("sample", [*names_in("world.py"), *names_in("world_torch.py"), *names_in("corrected.py")])
def test_a_sample_without_a_trainer(world, sample):
    needs_backend("pytorch-ddp")
    assert world.get(sample) is None, world[sample]


@pytest.fixture(scope="module")
def trainers(drive):
    """Started by 002's train.sh, whose train.py is the driver."""
    return drive(["bash", SAMPLES / "002/train.sh"], "trainers.py")


@pytest.mark.docs
@pytest.mark.xdist_group("trainers")
@pytest.mark.parametrize("sample", names_in("trainers.py"))
def test_a_sample_with_a_trainer(trainers, sample):
    assert trainers.get(sample) is None, trainers[sample]


@pytest.fixture(scope="module")
def zero(drive):
    needs_backend("deepspeed")
    train = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--run-dir", "run"]
    return drive([*train, "--nproc-per-node", "2"], "zero_driver.py")


@FULL
@pytest.mark.parametrize("sample", names_in("zero_driver.py"))
def test_a_sample_for_deepspeed(zero, sample):
    assert zero.get(sample) is None, zero[sample]


@pytest.fixture(scope="module")
def horovod(drive):
    """Started by 002's horovodrun."""
    needs_backend("horovod")
    return drive(["bash", SAMPLES / "002/horovod.sh"], "horovod_driver.py")


@FULL
@pytest.mark.parametrize("sample", names_in("horovod_driver.py"))
def test_a_sample_for_horovod(horovod, sample):
    assert horovod.get(sample) is None, horovod[sample]


@FULL
def test_sweeps_find_their_best(start, tmp_path):
    needs_backend("ray")
    samples = ("002/ray_tune.py", "002/tuner.py")
    with tempfile.TemporaryDirectory(prefix="seeds-") as out:  # short: sockets lie in it
        done = start([sys.executable, str(HERE / "sweeps.py"), out], tmp_path, environment(HOME=out)).finish(
            200, grace=30
        )
    assert done.returncode == 0, (samples, done.output[-3000:])
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["accuracies"]) == 2 and max(found["accuracies"]) > 0.5
    assert found["said"] == f"Best config: {found['best']}" and found["best"]["hidden_size"] in (8, 16, 32)
    assert found["best_params"] == {"lr": 0.05}


@FULL
def test_tensorflows_own_strategy_trains(start, tmp_path):
    """002/mirrored.py"""
    needs_backend("tensorflow")
    done = start([sys.executable, str(HERE / "mirrored_driver.py")], tmp_path, environment()).finish(120)
    assert done.returncode == 0, done.output[-3000:]
    replicas, first, last = re.search(r"replicas (\d+), losses ([\d.]+) ([\d.]+)", done.stdout).groups()
    assert replicas == "1" and float(last) < float(first)


# ------------------------------------------------------------------ scripts that are started from a shell


def told(run_dir: Path) -> list[tuple[str, str]]:
    """(loss, weights) that names.py says at the end of each rank."""
    logs = [(run_dir / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    return [re.search(r"loss ([\d.]+) weights (\S+)", log).groups() for log in logs]


@pytest.mark.docs
@pytest.mark.parametrize("document", ["000", "001"])
def test_the_launcher_trains_the_template(shell, tmp_path, document):
    """000/launch.sh with 000/train.py, 001/launch.sh with 001/train.py"""
    done = shell(f"{document}/launch.sh", {"train.py": SAMPLES / document / "train.py"})

    assert done.returncode == 0, done.output
    assert ("Process 0/2 on GPU 0" if document == "000" else "Process 0/2") in done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    first, second = told(run_dir)
    assert first == second and float(first[0]) < 0.5  # above 1 before; the ranks saw other samples


@pytest.mark.docs
def test_a_single_node_script_that_exports_rank_0_launches(shell, tmp_path):
    done = shell("001/single_node.sh", {"train.py": SAMPLES / "001/train.py"})

    assert done.returncode == 0, done.output
    stale = "RANK=0 and WORLD_SIZE=2 in the environment are ignored, because nproc_per_node=2 is given"
    assert stale in done.stdout and "Process 0/2" in done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    first, second = told(run_dir)
    assert first == second


@pytest.mark.docs
def test_a_script_that_joins_the_others_also_runs_alone(shell):
    done = shell("001/cpu.sh", {"your_distributed_script.py": SAMPLES / "001/simple.py"})

    assert done.returncode == 0, done.output
    assert (
        "World size: 1, Rank: 0\nAll-reduce result: tensor([1., 2., 3.])\nSampler generated 100 indices\n"
        "✅ Basic functionality working\n"
    ) in done.stdout


@FULL
def test_scripts_are_launched_from_python(start, tmp_path):
    done = start([sys.executable, str(HERE / "launches.py")], tmp_path, environment()).finish(120)

    assert done.returncode == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    for document in ("000", "001"):
        arguments = ["--model", "transformer", "--batch_size", "32"]
        assert found[f"{document}/launch_training.py"]["seen"] == [repr((arguments, "2"))] * 2
    assert found["001/launcher.py"] == {"seen": [repr((["--epochs", "100"], "2"))] * 2, "exit_code": 0}


@FULL
def test_a_trainer_runs_under_torchs_older_launcher(shell):
    done = shell("002/train_single_node.sh", {"train.py": HERE / "with_a_trainer.py"})

    assert done.returncode == 0, done.output
    assert "4 steps of 2 processes" in done.stdout


@pytest.mark.docs
def test_a_crashed_run_of_the_same_checkpoint_directory_goes_on(start, tmp_path):
    """002/fault_tolerance.py"""
    crashed, done = (
        start([sys.executable, str(HERE / "resumed.py"), *argument], tmp_path, environment()).finish(60)
        for argument in (["fail"], [])
    )

    assert crashed.returncode == 1 and "on purpose" in crashed.stderr, crashed.output
    assert done.returncode == 0 and "resumed from step-00000004" in done.stdout, done.output
    assert json.loads(done.stdout.splitlines()[-1]) == {"steps": 12, "rows": [4, 8, 12]}


# ------------------------------------------------------------------ the GPT of 003


GPT = {"char_gpt.py": ROOT / "examples" / "char_gpt.py"}


def runs_of(directory: Path) -> list[Path]:
    """The run directories of a shell sample in the order of its commands; each run is finished."""
    runs = sorted((directory / "runs").iterdir())  # their names have the time
    for run_dir in runs:
        result = json.loads((run_dir / "result.json").read_text())
        assert (result["status"], result["world_size"], result["steps"]) == ("finished", 2, 4)
    return runs


@pytest.mark.docs
def test_world_size_alone_starts_that_many_processes(shell, tmp_path):
    done = shell("003/single_node.sh", GPT)

    assert done.returncode == 0, done.output
    assert done.stdout.count("world_size is read as nproc_per_node") == done.stdout.count("2 processes, ") == 2
    smaller, larger = ((run_dir / "config.yaml").read_text() for run_dir in runs_of(tmp_path))
    assert "'32'\n- --attention-heads" in smaller and "'64'\n- --attention-heads" in larger


@pytest.mark.docs
def test_world_size_with_a_rank_is_one_process_of_several_commands(start, tmp_path):
    """003/rank_0.sh, 003/rank_1.sh"""
    shutil.copy(GPT["char_gpt.py"], tmp_path)
    where = environment(NODE0="127.0.0.1")

    ranks = [start(["bash", str(SAMPLES / f"003/rank_{rank}.sh")], tmp_path, where) for rank in (0, 1)]
    done = [rank.finish(120) for rank in ranks]

    assert [each.returncode for each in done] == [0, 0], done[0].output + done[1].output
    assert "2 processes on cpu" in done[0].stdout and done[1].stdout == ""  # it has its log
    assert len(runs_of(tmp_path)) == 1


@FULL
def test_gradient_checkpointing_and_mixed_precision_by_the_flags_of_003(shell, tmp_path):
    done = shell("003/memory.sh", GPT)

    assert done.returncode == 0, done.output
    assert re.findall("activation checkpointing on 2 blocks|mixed precision bf16", done.stdout) == [
        "activation checkpointing on 2 blocks", "mixed precision bf16",
    ]  # fmt: skip
    assert len(runs_of(tmp_path)) == 2


@pytest.mark.docs
def test_the_other_flags_of_003(shell, tmp_path):
    done = shell("003/research.sh", GPT)

    assert done.returncode == 0, done.output
    assert "mixed precision bf16" in done.stdout
    (run_dir,) = runs_of(tmp_path)
    saved = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004"]


# ------------------------------------------------------------------ 004's own starts


@FULL
def test_processes_that_torch_spawns_train(start, tmp_path):
    """004/spawn_ddp.py: it has nothing of ours. It destroys the process group before its DDP wrapper; torch 2.13 then aborts one of
    its processes in some runs (4 of 16, idle machine), after all is done."""
    for name, script in (("train.py", SAMPLES / "004/spawn_ddp.py"), ("names.py", HERE / "names.py")):
        shutil.copy(script, tmp_path / name)

    done = start([sys.executable, "train.py"], tmp_path, environment()).finish(120)

    aborted = "terminate called without an active exception" in done.stderr and "with signal SIGABRT" in done.stderr
    assert done.returncode == (1 if aborted else 0), done.output
    losses = [float(loss) for loss in re.findall(r"^Epoch \d+, Loss: ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["checkpoint_epoch_4.pt", "checkpoint_epoch_9.pt"]


@FULL
def test_torchrun_starts_a_script_without_a_trainer(shell):
    """004/train_ddp.py, started by 004/torchrun.sh"""
    done = shell("004/torchrun.sh", {"train_ddp.py": SAMPLES / "004/train_ddp.py"})

    assert done.returncode == 0, done.output
    assert set(re.findall(r"a model in process \d of \d", done.stdout)) == {
        f"a model in process {rank} of 2" for rank in (0, 1)
    }
