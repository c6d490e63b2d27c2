"""`fit` in a notebook cell trains classes of the notebook, shows progress, returns the result to the kernel and leaves no process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError

from tests.conftest import poll
from tests.kernel import QUIET, Kernel

pytestmark = [pytest.mark.timeout(600), QUIET]

DEFINITIONS = """
import os, time
import torch
from torch.utils.data import DataLoader, Dataset
from distributed import Callback, Trainer

%cd -q {directory}
used = torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()   # autograd's threads are up in this kernel

class Digits(Dataset):
    def __init__(self, size):
        self.x = torch.randn(size, 4)
        self.y = (self.x.sum(1) > 0).long()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], self.y[index]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.line(x)

class Slow(Callback):
    def on_step_end(self, state, result):
        open(f"step-{{state.step}}", "w").close()
        time.sleep(0.02)

torch.manual_seed(0)
"""
GROUP = """
import torch.distributed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

def gathered():
    found = [None]
    torch.distributed.all_gather_object(found, 7)
    return found
"""
FIT = """
net = Net()
trainer = Trainer(net, nproc_per_node=2, epochs=3, learning_rate=0.05)
history = trainer.fit(DataLoader(Digits(256), batch_size=8, shuffle=True), Digits(64))
"""
LONG = """
net = Net()
trainer = Trainer(net, nproc_per_node=2, epochs=50, callbacks=[Slow()])
trainer.fit(DataLoader(Digits(256), batch_size=8))
"""
REPORT = """
import json
print(json.dumps({"best": trainer.best_accuracy, "run_dir": history.run_dir, "steps": history.steps,
                  "grad": net.line.weight.requires_grad, "accuracy": trainer.evaluate(Digits(64))["accuracy"]}))
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("notebook")
    with Kernel(directory) as running:
        running.directory = directory
        running.run(DEFINITIONS.format(directory=directory))
        yield running


def test_a_cell_trains_shows_progress_and_gives_the_result_back(kernel):
    shown, bars = kernel.run(FIT), kernel.bars
    report = json.loads(kernel.run(REPORT).splitlines()[-1])

    lines = shown.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["1/3", "2/3", "3/3"]
    assert "backend pytorch-ddp, 2 processes on cpu" in lines
    assert len(lines) < 15 and "\x1b" not in shown, shown
    assert bars == [""]  # the bar is removed at the end
    assert report["steps"] == 48 and report["grad"]
    assert report["best"] > 0.8 and report["accuracy"] > 0.8
    assert (kernel.directory / report["run_dir"] / "result.json").exists()
    written = (kernel.directory / report["run_dir"] / "config.yaml").read_text()
    assert written.splitlines()[0].endswith('again: Trainer(model, config="THIS")') and "script:" not in written
    assert kernel.alive() == [kernel.pid]


def test_the_cell_can_be_run_again_also_where_the_kernel_has_a_process_group(kernel):
    kernel.run(GROUP)
    kernel.run(FIT)
    report = json.loads(kernel.run(REPORT).splitlines()[-1])

    assert Path(report["run_dir"]).parent.parent.name == "runs"
    assert Path(report["run_dir"]).name == "fit-2"
    assert report["steps"] == 48 and report["accuracy"] > 0.8
    # The user's own process group is unchanged.
    assert kernel.run("print(torch.distributed.get_world_size(), gathered())") == "1 [7]\n"


def test_a_fit_in_the_kernel_itself_has_a_bar_too(kernel):
    shown = kernel.run(FIT.replace("nproc_per_node=2, epochs=3", "nproc_per_node=1, epochs=1, log_every_n_steps=4"))

    assert kernel.bars == [""] and "\x1b" not in shown
    assert not [line for line in shown.splitlines() if line.startswith("step ")]


def test_an_error_in_the_workers_is_the_cells_error(kernel):
    with pytest.raises(CellExecutionError) as error:
        kernel.run(FIT.replace("learning_rate=0.05", "training_step=lambda model, batch: model(batch[0]).nonsense()"))

    text = str(error.value)
    cause = text[text.index("TrainingError\x1b[39m: rank ") :]
    assert "    trainer = Trainer(net, nproc_per_node=2" in cause  # the line comes from the cell, which is in no file
    assert cause.endswith("AttributeError: 'Tensor' object has no attribute 'nonsense'\n")
    assert kernel.alive() == [kernel.pid]


def test_interrupting_the_kernel_saves_and_leaves_no_process(kernel):
    seen: set[str] = set()

    def has_moved() -> bool:
        seen.update(kernel.bars)
        return len(seen) >= 3

    def interrupt() -> None:
        poll(has_moved, 60, lambda: f"no bar, or one that stands still: {seen}\n{kernel.output}")
        assert len(kernel.bars) == 1 and (kernel.directory / "step-5").exists()
        os.kill(kernel.pid, signal.SIGINT)

    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        kernel.run(LONG, interrupt)

    assert "SIGINT: stopping after this step" in kernel.output
    assert all('<progress value="' in bar and 'max="800"' in bar for bar in seen)
    poll(lambda: kernel.alive() == [kernel.pid], 60, lambda: f"left {kernel.alive()}")
    found = kernel.run(
        "print(trainer._fits.remote.step, trainer._fits.remote.checkpoint, net.line.weight.requires_grad)"
    ).split()
    assert int(found[0]) >= 5
    assert (Path(found[1]) / "manifest.json").exists()


def test_killing_the_kernel_leaves_nobody(tmp_path):
    with Kernel(tmp_path) as kernel:
        kernel.run(DEFINITIONS.format(directory=tmp_path))

        def kill() -> None:
            poll(lambda: (tmp_path / "step-3").exists(), 60, lambda: f"no step\n{kernel.output}")
            assert len(kernel.alive()) == 5
            os.kill(kernel.pid, signal.SIGKILL)

        with pytest.raises(Exception, match="Kernel died"):
            kernel.run(LONG, kill)
        poll(lambda: kernel.alive() == [], 60, lambda: f"left {kernel.alive()}")
