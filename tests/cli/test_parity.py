"""`distributed parity`: a script everywhere, and what it says of the numbers. About 40 s: a start of workers takes 1.5."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys

import numpy
import pytest

from distributed.backends import capabilities
from distributed.cli.__main__ import main
from distributed.config.plan import BatchPlan
from distributed.config.registry import REGISTRY
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.parity.comparison import ParityOptions, Trained, cells_of, farthest
from distributed.parity.runs import Start, is_for, read_run
from tests.conftest import needs_backend

SCRIPT = """
import os, sys
import torch
from distributed import Trainer
from distributed.callbacks import ExponentialMovingAverage

kind = sys.argv[1] if len(sys.argv) > 1 else ""
generator = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(52, 6, generator=generator), torch.randint(0, 3, (52,), generator=generator))

def model():
    if kind == "raises":
        raise ValueError("no model today")
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh()]
    if kind == "drops":
        layers.append(torch.nn.Dropout(0.5))
    if kind == "normalises":
        layers.append(torch.nn.BatchNorm1d(8))
    if kind == "draws":
        torch.seed()  # other first weights in every run
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))

if kind == "nothing":
    sys.exit()
if kind == "several":
    def training_step(models, batch, update):
        x, y = batch
        outputs = models["body"](x)
        update("body", d_loss := torch.nn.functional.mse_loss(outputs, x))
        update("head", loss := torch.nn.functional.cross_entropy(models["head"](outputs.detach()), y))
        return {"loss": loss, "d_loss": d_loss}

    torch.manual_seed(0)
    models = {"body": torch.nn.Linear(6, 6), "head": torch.nn.Linear(6, 3)}
    optimizers = {name: lambda params: torch.optim.SGD(params, lr=0.1) for name in models}
    Trainer(models=models, optimizers=optimizers, training_step=training_step, batch_size=16).fit(data)
    sys.exit()
if kind == "draws":  # also averages of the weights, and validation inside the epoch
    settings = {"validate_every_n_steps": 2, "monitor": "val_in_loss", "optimizer": "adamw", "scheduler": "cosine"}
    trainer = Trainer(model, learning_rate=1e-2, batch_size=16, callbacks=[ExponentialMovingAverage(decay=0.5)], **settings)
    trainer.fit(torch.utils.data.DataLoader(data, shuffle=True), {"in": data, "out": data})
    sys.exit()
world = int(os.environ.get("WORLD_SIZE", 1))
rate = 1e-2 * (world if kind == "scales" else 1)
trainer = Trainer(model, learning_rate=rate, batch_size=16, **({"gradient_clipping": -1} if kind == "wrong" else {}))
trainer.fit(torch.utils.data.DataLoader(data, shuffle=True))
"""


@pytest.fixture
def parity(run_cli, tmp_path):
    """Run it on the script's case `kind`."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(kind, *flags, timeout=180):
        arguments = ["parity", "--script", "script.py", "--steps", "5", *flags, "--", kind]
        return run_cli(arguments, timeout=timeout, cwd=tmp_path)

    return run


@pytest.mark.full
def test_a_script_that_is_the_same_everywhere_but_for_its_first_weights(parity, tmp_path):
    """They are others each time it runs: all runs start from the reference's."""
    done = parity(
        "draws", "--backends", "single,pytorch-ddp,fsdp", "--world-sizes", "2", "--keep", str(tmp_path / "runs")
    )
    assert done.returncode == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {tuple(line.split()[:2]): line.split() for line in lines if line}
    assert rows["pytorch-ddp", "2"][-1] == "ok" and rows["in", "2"][-1] == rows["in", "float64"][-1] == "floor"
    assert rows["single", "1"][-1] == "reference" and float(rows["single", "1"][2]) == 0
    assert 0 <= float(rows["pytorch-ddp", "2"][2]) < 1e-9 < float(rows["pytorch-ddp", "2"][4]) < 1e-4
    assert "5 steps, global batch size 16" in lines[0] and lines[-1] == "all agree"
    run = tmp_path / "runs" / "pytorch-ddp-2-float32-1"
    trained = read_run(run)
    assert {("val", 2, "in"), ("val", 4, "out"), ("train", 5)} <= trained.losses.keys()
    averaged = {name: value for name, value in trained.weights.items() if name.startswith("averaged/")}
    assert len(averaged) * 2 == len(trained.weights)
    assert all(
        farthest({"": value}, {"": trained.weights[name.removeprefix("averaged/")]}) > 0
        for name, value in averaged.items()
    )


@pytest.mark.full
def test_several_models_and_their_losses_are_compared(parity, tmp_path):
    flags = ["--backends", "pytorch-ddp,fsdp,ray", "--world-sizes", "2", "--keep", str(tmp_path / "runs")]
    done = parity("several", *flags)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all agree", done.output
    assert ("train", 3, "d") in read_run(tmp_path / "runs" / "fsdp-2-float64-1").losses


def test_a_script_that_depends_on_the_number_of_processes_is_found_out(parity):
    done = parity("scales", "--backends", "pytorch-ddp", "--world-sizes", "2", "--json")
    assert done.returncode == 1, done.output
    report = json.loads(done.stdout)
    judged = {(each["cell"]["backend"], each["cell"]["dtype"]): each for each in report["compared"]}
    assert judged["pytorch-ddp", "float64"]["verdict"] == "FAR" and not report["is_good"]
    assert judged["pytorch-ddp", "float64"]["weights"] > 1e-3


@pytest.mark.parametrize(
    ("kind", "name", "worlds"),
    [
        pytest.param("drops", "2 (Dropout)", "2", marks=pytest.mark.full),
        pytest.param("normalises", "2 (BatchNorm1d)", "1,2", marks=pytest.mark.full),
    ],
)
def test_what_depends_on_the_split_is_named_and_not_counted_as_failure(parity, kind, name, worlds):
    """One process is judged; more of them are shown, and far away."""
    done = parity(kind, "--backends", "pytorch-ddp", "--world-sizes", worlds)
    assert done.returncode == 0, done.output
    *one, two = [line.split() for line in done.stdout.splitlines() if line.startswith("pytorch-ddp")]
    assert [(line[1], line[-1], float(line[2])) for line in one] == [("1", "ok", 0)] * (worlds == "1,2")
    (cut,) = [line.split() for line in done.stdout.splitlines() if line.startswith("  in 2 slices")]
    assert cut[-1] == "split"
    assert (two[1], two[-1]) == ("2", "split") and float(two[2]) > 1e-6
    assert f"because of {name}" in done.stdout


KERAS = """
import keras
import numpy
from distributed import Trainer

class Data:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = numpy.random.default_rng(index).normal(size=6).astype("float32")
        return x, int(x.sum() > 0)

def model():
    layers = keras.layers
    made = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(2)])
    made.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made

Trainer(model, batch_size=8, shuffle=True).fit(Data())
"""


@pytest.mark.timeout(480)
@pytest.mark.full  # test_tensorflow.py has a checkpoint of torch go on, and the other way round
def test_keras_on_tensorflow_stands_beside_one_process_of_torch_and_one_of_its_own(run_cli, tmp_path):
    """Each engine draws other first weights from a seed. Eight starts of Keras: about 40 s."""
    needs_backend("tensorflow")
    (tmp_path / "script.py").write_text(KERAS)
    command = ["parity", "--script", "script.py", "--backends", "tensorflow", "--world-sizes", "2", "--steps", "4"]
    done = run_cli([*command, "--json"], timeout=220, cwd=tmp_path)
    assert done.returncode == 0, done.output
    report = json.loads(done.stdout)
    judged = {
        (each["reference"], each["cell"]["dtype"]): each
        for each in report["compared"]
        if each["cell"]["world_size"] == 2
    }
    assert set(judged) == {(name, dtype) for name in ("single", "tensorflow") for dtype in ("float64", "float32")}
    assert {each["verdict"] for each in judged.values()} == {"ok"}
    assert set(report["floors"]) == {"single", "tensorflow"} and all(
        0 < each < 1e-3 for each in report["floors"].values()
    )
    assert all(judged[name, "float64"]["weights"] < 1e-9 for name in ("single", "tensorflow"))
    assert judged["single", "float32"]["first_loss"] < 1e-6


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("wrong", 2, "gradient_clipping=-1 must be greater than 0"),
        (
            "nothing",
            2,
            "script.py ended without a fit of a Trainer, whose numbers are compared: give a script that trains",
        ),
        ("raises", 1, "single, 1 process, float32: rank 0 failed with ValueError: ValueError: no model today"),
    ],
)
def test_a_script_that_does_not_train_is_the_users_error(parity, kind, code, said):
    done = parity(kind, "--backends", "pytorch-ddp", "--world-sizes", "2")
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr, done.output


def test_ctrl_c_leaves_nothing_running(start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = start(
        [sys.executable, "-m", "distributed.cli", "parity", "--script", "script.py", "--steps", "100000", "--keep", "runs"], cwd=tmp_path
    )  # fmt: skip
    command.wait_for(lambda: (tmp_path / "runs" / "single-1-float32-1" / "metrics.jsonl").exists())
    command.signal(signal.SIGINT)
    assert command.finish(timeout=20).returncode == 130


def test_a_killed_parity_leaves_nothing_running(start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = start(
        [sys.executable, "-m", "distributed.cli", "parity", "--script", "script.py", "--steps", "100000", "--keep", "runs"], cwd=tmp_path
    )  # fmt: skip
    command.wait_for(lambda: (tmp_path / "runs" / "single-1-float32-1" / "metrics.jsonl").exists())
    command.signal(signal.SIGKILL)
    assert command.finish(timeout=20, grace=5).returncode == -signal.SIGKILL


def leave(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--script", "none.py"], 2, "script 'none.py' does not exist"),
        (["--script", __file__, "--backends", "fdsp"], 2, "did you mean 'fsdp'?"),
        (["--script", __file__, "--world-sizes", "1,x"], 2, "are not numbers of processes"),
        (["--script", __file__, "--backends", ","], 2, "contains no name"),
        (["--script", __file__, "--steps", "0"], 2, "steps"),
        (["--script", __file__, "--set", "batchsize=3"], 2, "did you mean 'batch_size'"),
        (
            ["--script", __file__, "--backends", "fsdp", "--set", "ray.cpus_per_worker=2"],
            2,
            "has no effect on fsdp: drop it",
        ),
        ([], 2, "--script"),
    ],
)
def test_a_mistake_is_one_line(flags, code, said, capsys):
    found, _, error = leave(["parity", *flags], capsys)
    assert found == code and said in error and error.count("\n") == 1


def test_a_backend_without_its_library_is_an_error_where_it_was_named(monkeypatch, capsys):
    monkeypatch.setattr(capabilities, "missing_libraries", lambda row: ("engine",) if row.name == "fsdp" else ())
    code, _, error = leave(["parity", "--script", __file__, "--backends", "fsdp"], capsys)
    assert code == 3 and "'fsdp' needs engine, which is not installed: run pip install" in error


def test_a_backend_without_its_library_is_left_out_of_all(monkeypatch, tmp_path):
    from distributed.parity import comparison as module

    monkeypatch.setattr(capabilities, "missing_libraries", lambda row: ("engine",) if row.name == "fsdp" else ())
    result = module.ParityResult("s.py", 5, 1e-9)
    options = ParityOptions("s.py", (), tuple(REGISTRY), True, (1,), 5, 1e-9, None, (), DistributedConfig(), tmp_path)
    assert list(module._usable(options, result)) == [name for name in REGISTRY if name != "fsdp"]
    (skipped,) = result.skipped
    assert skipped.what == "fsdp" and REGISTRY["fsdp"].install in skipped.reason and result.is_good


def test_options_of_a_backend_go_to_its_runs(tmp_path):
    settings = ("fsdp.cpu_offload=true", "ray.engine=fsdp", "seed=1")
    config = DistributedConfig(fsdp={"cpu_offload": True}, ray={"engine": "fsdp"}, seed=1)
    options = ParityOptions("s.py", (), tuple(REGISTRY), True, (1,), 5, 1e-9, None, settings, config, tmp_path)
    found = {
        name: [setting.partition("=")[0] for setting in settings if is_for(options, setting, name)] for name in REGISTRY
    }
    assert found.pop("fsdp") == ["fsdp.cpu_offload", "seed"]
    assert found.pop("ray") == ["fsdp.cpu_offload", "ray.engine", "seed"]
    assert set(map(tuple, found.values())) == {("seed",)}


def measured(monkeypatch, tmp_path, refusing, *backends, dependent=(), cut=0.0):
    """The result for runs that all give the same numbers, except that those of `refusing` refuse the script, and slices move the
    weights by `cut`."""
    from distributed.parity import comparison as module

    def trained(options, cell, start):
        if cell.backend in refusing:
            raise ConfigError(f"{cell.backend} does not take it")
        batch = BatchPlan(8, 1, 1, 8)
        weights = {"w": numpy.ones(3) + (cut if cell.cut > 1 else 0.0)}
        return Trained(weights, {("train", 1): 0.5}, batch, 0.1, dependent, Start(tmp_path, batch))

    monkeypatch.setattr(module, "run", trained)
    monkeypatch.setattr(capabilities, "missing_libraries", lambda row: ())
    is_all = not backends
    options = ParityOptions(
        "s.py", (), backends or tuple(REGISTRY), is_all, (1, 2), 5, 1e-9, None, (), DistributedConfig(), tmp_path
    )
    return module.measure(options, lambda cell: None)


def test_a_script_that_one_framework_refuses_is_compared_within_the_other(monkeypatch, tmp_path):
    of_torch = {name for name, row in REGISTRY.items() if row.alone == "single"}
    result = measured(monkeypatch, tmp_path, of_torch)
    assert (
        {each.reference for each in result.compared}
        == {each.cell.backend for each in result.compared}
        == {"tensorflow"}
    )
    assert {each.what for each in result.skipped} == of_torch and result.is_good

    result = measured(monkeypatch, tmp_path, {"tensorflow"})
    assert {each.reference for each in result.compared} == {"single"} and result.is_good
    assert [each.what for each in result.skipped] == ["tensorflow"]


@pytest.mark.parametrize(("dependent", "verdict"), [((), "floor"), (("2 (BatchNorm1d)",), "split")])
def test_slices_are_no_floor_where_results_depend_on_them(monkeypatch, tmp_path, dependent, verdict):
    result = measured(monkeypatch, tmp_path, (), "pytorch-ddp", dependent=dependent, cut=4.0)
    (found,) = {each.verdict for each in result.compared if each.cell.cut > 1}
    assert found == verdict and (result.floors["single"] == 4.0) == (verdict == "floor")


def test_a_backend_that_was_named_and_refuses_the_script_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="tensorflow does not take it"):
        measured(monkeypatch, tmp_path, {"tensorflow"}, "tensorflow")
    with pytest.raises(ConfigError, match="single does not take it"):
        measured(monkeypatch, tmp_path, {"single"}, "pytorch-ddp", "tensorflow")
    with pytest.raises(ConfigError, match="single does not take it"):
        measured(monkeypatch, tmp_path, set(REGISTRY))


def test_a_refusal_of_a_backend_that_was_named_keeps_the_results_of_the_others(monkeypatch, tmp_path):
    result = measured(monkeypatch, tmp_path, {"fsdp"}, "fsdp", "pytorch-ddp")
    assert {each.cell.backend for each in result.compared} == {"single", "pytorch-ddp"} and not result.is_good
    assert [(each.what.partition(",")[0], each.is_failure) for each in result.skipped] == [("fsdp", True)]


def test_one_process_alone_is_run_once():
    assert {cell.world_size for cell in cells_of("single", (1, 2, 3))} == {1}
    assert [cell.world_size for cell in cells_of("pytorch-ddp", (2, 3))] == [2, 2, 3, 3]


def test_weights_that_are_no_numbers_are_near_nothing():
    from distributed.parity import comparison as module

    inf = float("inf")
    result = module.ParityResult("s.py", 5, 1e-9, floors={"single": inf})
    cell = module.Cell("deepspeed", 2, "float32")
    each = module.Compared(cell, "single", weights=inf, losses=inf, first_loss=0.0, step_s=0.1)
    assert module._verdict(each, result) == "FAR"
    result.floors["single"] = 1e-6
    assert module._verdict(dataclasses.replace(each, weights=2e-6), result) == "ok"


def test_a_number_of_processes_written_in_two_ways_is_one():
    from distributed.cli.parity import _worlds

    assert _worlds("1, 2,02") == (1, 2)


def test_weights_of_other_names_or_without_a_number_are_infinitely_far():
    assert farthest({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.0}) == 0.5
    assert farthest({"a": 1.0}, {"b": 1.0}) == farthest({"a": float("nan")}, {"a": 1.0}) == float("inf")
    assert farthest({"a": [1.0, 2.0]}, {"a": [1.0]}) == float("inf")


def test_a_file_is_no_directory_to_keep_the_runs_in(parity, tmp_path):
    (tmp_path / "file").touch()
    done = parity("same", "--keep", str(tmp_path / "file"))
    assert done.returncode == 2 and "file is not an empty directory" in done.stderr, done.output
    assert "Traceback" not in done.stderr
