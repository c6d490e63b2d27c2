"""In the learning-rate finder all processes agree, and the trainer is unchanged afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import needs_backend

JOB = str(Path(__file__).parent / "jobs" / "rate_finder.py")
pytestmark = pytest.mark.timeout(360)


@pytest.fixture(scope="module")
def workers(tmp_path_factory, run_cli_once):
    """Return what each of two workers saw, and the run directory, which is resumed once."""
    out = tmp_path_factory.mktemp("workers")
    command = ["train", "--script", JOB, "--nproc-per-node", "2", "--run-dir", str(out / "run")]
    command += ["--learning-rate", "0.05"]  # counts for the fit only
    done = run_cli_once([*command, "--", str(out), "{}"], timeout=120)
    assert done.returncode == 0, done.output[-3000:]
    return [json.loads((out / f"seen-{rank}.json").read_text()) for rank in (0, 1)], out, done


def test_all_ranks_suggest_the_same(workers):
    (one, other), _, _ = workers
    assert one["suggestion"] == other["suggestion"] and one["losses"] == other["losses"]
    assert 1e-3 < one["suggestion"] < 10


def test_the_losses_are_those_of_updates_at_the_rates(workers):
    """Compare the losses with those that the copy logged. The finder ends where the loss has diverged."""
    (one, _), out, _ = workers
    rows = [json.loads(line) for line in (out / "run" / "learning-rate" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["split"] == "train"]
    assert [row["loss"] for row in steps] == one["losses"]
    following = [row["learning_rate"] for row in steps]  # the logged rate is that of the next update
    assert following[: len(one["rates"]) - 1] == pytest.approx(one["rates"][1:])
    assert 50 < len(one["losses"]) < 100


def test_a_trainer_trains_after_the_finder_as_without_it(workers):
    for seen in workers[0]:
        assert seen["is_untouched"] and seen["user_callbacks"] == 0 and seen["num_models"] == 1
        assert seen["after"]["weights"] == seen["plain"]["weights"]
        assert seen["after"]["losses"] == seen["plain"]["losses"]


def test_the_finder_leaves_a_curve_below_the_run_and_takes_no_number_of_a_fit(workers):
    (one, _), out, done = workers
    run = out / "run"
    assert one["after"]["run_dir"] == str(run) and one["plain"]["run_dir"] == str(run / "fit-2")
    kept = json.loads((run / "learning-rate" / "curve.json").read_text())
    assert kept["losses"] == one["losses"] and kept["request"]["max_rate"] == 100.0
    assert not (run / "learning-rate" / "checkpoints").exists() and not (run / "learning-rate" / "tensorboard").exists()
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())
    assert done.stdout.count(" at step ") == 2, done.output  # once for the end of each of the two fits


@pytest.mark.full
def test_workers_that_the_finder_starts_itself_find_the_same(workers, run_python, tmp_path):
    (one, _), _, _ = workers
    settings = json.dumps({"nproc_per_node": 2, "learning_rate": 0.05})
    done = run_python([JOB, str(tmp_path), settings], timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    seen = json.loads((tmp_path / "seen-0.json").read_text())
    for name in ("losses", "suggestion", "is_untouched", "user_callbacks"):
        assert seen[name] == one[name], name
    assert seen["after"]["weights"] == one["plain"]["weights"]
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "learning-rate" / "curve.json").exists() and (run / "checkpoints").is_dir()
    assert not (run / "learning-rate" / "checkpoints").exists()


RESUMED = """
import json, torch
from torch.utils.data import TensorDataset
from distributed import Trainer

x = torch.randn(64, 4)  # other data and weights in each run
data = TensorDataset(x, (x[:, 0] > 0).long())
trainer = Trainer(torch.nn.Linear(4, 2), epochs=1, batch_size=16)
curve = trainer.find_learning_rate(data, num_steps=20)
trainer.fit(data)
print("LOSSES", json.dumps(curve.losses))
"""


def test_a_run_that_goes_on_takes_the_curve_that_it_found(run_cli, tmp_path):
    (tmp_path / "train.py").write_text(RESUMED)

    def losses(*more):
        command = ["train", "--script", "train.py", "--run-dir", "run", "--nproc-per-node", "1", "--device", "cpu"]
        done = run_cli([*command, *more], cwd=tmp_path)
        assert done.returncode == 0, done.output
        return next(line for line in done.stdout.splitlines() if line.startswith("LOSSES"))

    assert losses() == losses("--resume", "--epochs", "2")


KERAS = """
import json, random, numpy, keras
from distributed import Trainer

keras.utils.set_random_seed(0)
x = numpy.random.default_rng(0).normal(size=(96, 4)).astype("float32")
data = [(x[i], numpy.int64(x[i, 0] > 0)) for i in range(96)]
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
model.compile(optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
trainer = Trainer(model, backend="tensorflow", batch_size=16)
before = [value.numpy().tolist() for value in model.variables], random.getstate()
curve = trainer.find_learning_rate(data, max_rate=100.0, num_steps=40)
after = [value.numpy().tolist() for value in model.variables], random.getstate()
print("FOUND", json.dumps([curve.rates, curve.losses, curve.suggestion, before == after, float(model.optimizer.learning_rate) < 0.11]))
trainer.fit(data)
"""


def test_the_finder_trains_a_keras_model_alike(run_python, tmp_path):
    needs_backend("tensorflow")
    (tmp_path / "train.py").write_text(KERAS)
    done = run_python(["train.py"], timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    found = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    rates, losses, suggestion, is_untouched, is_slow = json.loads(found.removeprefix("FOUND "))
    assert is_untouched and is_slow and 1e-3 < suggestion < 100 and losses[0] > min(losses)
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "learning-rate" / "metrics.jsonl").read_text().splitlines()]
    following = [row["learning_rate"] for row in rows if row["split"] == "train"]
    assert following[: len(rates) - 1] == pytest.approx(rates[1:])
