"""The notebooks in examples/notebooks run from top to bottom and show what they say; a sweep that is interrupted ends."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from PIL import Image

from tests.conftest import describe, needs_backend, poll
from tests.kernel import QUIET, Kernel

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
pytestmark = [pytest.mark.timeout(1200), QUIET]

TRAINER_FACTS = """
print(json.dumps({
    "accuracy": measured["accuracy"], "predicted": (predicted == right).float().mean().item(), "wrong": len(wrong),
    "alone": (alone(held_out.tensors[0]).argmax(1) == right).float().mean().item(), "rows": history.rows,
    "worlds": [json.loads(Path(run.run_dir, "result.json").read_text()) for run in (history, sharded_history)],
    "losses": [[row["val_loss"] for row in run.rows[:2]] for run in (history, sharded_history)],
}))
"""
SWEEP_FACTS = """
print(json.dumps({
    "best": best_params, "table": tuner.results.to_dict("records"), "accuracy": trainer.evaluate(held_out)["accuracy"],
    "epochs": [row["epoch"] for row in trainer.history.rows], "checkpoint": str(tuner.best_checkpoint),
}, default=str))
"""
ENDLESS = """
def endless(config):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    Trainer(net, config, epochs=10_000).fit(DataLoader(train, batch_size=32), held_out)

other = DistributedTuner(endless, {"lr": [0.1, 0.2]}, search="grid")
other.tune()
"""


def cells(name: str) -> list[str]:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


class Shown:
    """What the cells of a notebook showed, all together."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.text, self.html, self.pictures, self.pages, self.tables = "", "", [], [], []
        for source in cells(name):
            self.text += kernel.run(source)
            assert [out.text for out in kernel.outputs if out.get("name") == "stderr"] == []  # no warning, above all
            for data in (output.data for output in kernel.outputs if "data" in output):
                self._keep(data)

    def _keep(self, data: dict[str, str]) -> None:
        if "image/png" in data:
            self.pictures.append(Image.open(io.BytesIO(base64.b64decode(data["image/png"]))))
        self.html += "".join(data.get("text/html", ""))
        page = re.search(r'<iframe.*?src="([^"]+)"', data.get("text/html", ""), re.S)
        if page:
            self.pages.append(page[1])
        elif "<table" in data.get("text/html", ""):
            self.tables.append(data["text/plain"])


def is_drawn(picture: Image.Image) -> bool:
    """Whether it has more than a background."""
    return len(picture.convert("RGB").getcolors(1 << 24)) > 20


@pytest.mark.parametrize("file", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook_is_stored_without_outputs(file):
    stored = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert stored and all(cell.outputs == [] and cell.execution_count is None for cell in stored)


@pytest.mark.docs
def test_the_trainer_notebook(tmp_path):
    with Kernel(tmp_path) as kernel:
        shown = Shown(kernel, "trainer.ipynb")
        facts = json.loads(kernel.run("import json" + TRAINER_FACTS))
        poll(lambda: kernel.alive() == [kernel.pid], 60, lambda: describe(kernel.alive()))

    assert facts["accuracy"] > 0.95 and facts["accuracy"] == pytest.approx(facts["rows"][-1]["val_accuracy"], abs=1e-6)
    assert facts["predicted"] == pytest.approx(facts["accuracy"]) and facts["alone"] == pytest.approx(facts["accuracy"])
    assert f"held-out accuracy {facts['accuracy']:.4f}: {facts['wrong']} of 360" in shown.text
    assert facts["wrong"] == round(360 * (1 - facts["accuracy"]))
    assert [(run["backend"], run["world_size"]) for run in facts["worlds"]] == [("pytorch-ddp", 2), ("fsdp", 2)]
    assert facts["losses"][1] == pytest.approx(facts["losses"][0], rel=1e-4)
    assert len(shown.pictures) == 2 and all(map(is_drawn, shown.pictures))
    assert str(tmp_path) not in shown.text  # a path is short
    assert len(shown.tables) == 2 and "val_accuracy" in shown.tables[0] and "fsdp" in shown.tables[1]
    (page,) = shown.pages
    assert "<html" in (tmp_path / page).read_text()


@pytest.mark.full
@pytest.mark.docs
def test_the_sweep_notebook_and_a_sweep_that_is_interrupted(tmp_path):
    needs_backend("ray")
    with Kernel(tmp_path) as kernel:
        shown = Shown(kernel, "sweep.ipynb")
        facts = json.loads(kernel.run(SWEEP_FACTS).splitlines()[-1])
        poll(lambda: kernel.alive() == [kernel.pid], 60, lambda: describe(kernel.alive()))
        check_interrupted(kernel, tmp_path)

    table = facts["table"]
    assert len(table) == 6 and {row["status"] for row in table} == {"finished", "stopped"}
    assert all(row["epochs"] < 6 for row in table if row["status"] == "stopped")
    kinds = Counter(row["status"] for row in table)
    said = f"6 of 6 trials: {kinds['finished']} finished, {kinds['stopped']} stopped; best val_loss {table[0]['val_loss']:.4g}"
    assert said in shown.html
    losses = [row["val_loss"] for row in table]
    assert losses == sorted(losses) and losses[-1] > 2 * losses[0]
    assert (table[0]["lr"], table[0]["hidden"]) == (facts["best"]["lr"], facts["best"]["hidden"])
    assert facts["accuracy"] == pytest.approx(table[0]["val_accuracy"], abs=1e-6) and facts["accuracy"] > 0.9
    assert facts["epochs"] == list(range(1, int(table[0]["epoch"]) + 1))
    assert Path(facts["checkpoint"]).name in shown.text
    assert len(shown.pictures) == 2 and all(map(is_drawn, shown.pictures))
    assert str(tmp_path) not in shown.text  # a path is short
    assert any("val_accuracy" in table for table in shown.tables)
    (page,) = shown.pages
    assert "parallel" in (tmp_path / page).read_text().lower()


def check_interrupted(kernel: Kernel, directory: Path) -> None:
    """The stop button while trials train: they save, the cluster goes, and the kernel is as before."""
    before = set(directory.glob("runs/*"))

    def metrics() -> list[Path]:
        return [path for run in set(directory.glob("runs/*")) - before for path in run.glob("trials/*/metrics.jsonl")]

    def interrupt() -> None:
        poll(lambda: metrics() and metrics()[0].stat().st_size > 0, 120, lambda: f"no trial trains\n{kernel.output}")
        os.kill(kernel.pid, signal.SIGINT)

    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        kernel.run(ENDLESS, interrupt)
    shown = str([output.get("data") for output in kernel.outputs])
    poll(lambda: kernel.alive() == [kernel.pid], 60, lambda: describe(kernel.alive()))
    sweep = json.loads(kernel.run("print((other.run_dir / 'sweep.json').read_text())"))
    assert {trial["status"] for trial in sweep["trials"]} == {"interrupted"}
    assert f"0 of 2 trials: {len(sweep['trials'])} interrupted" in shown
    assert list((directory / "runs").glob("*/trials/00000/checkpoints/step-*"))
