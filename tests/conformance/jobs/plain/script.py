"""Train as in a script without regard for processes: no guard, everything at the top level, objects of every kind.

    script.py MODE       MODE: all, or two (fits of 2 and 1 epochs), or three (one fit of 3)

Writes facts-MODE.json and NAME.safetensors into the working directory.
"""

import json
import os
import sys
import warnings
from pathlib import Path

with open("runs-of-the-body.txt", "a") as file:
    file.write("x")

import torch
from beside import Net
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset

from distributed import Callback, PyTorchDDPTrainer, Trainer

warnings.simplefilter("error")
MODE = sys.argv[1]
torch.manual_seed(5)
facts = {"argv": sys.argv}


class Points(Dataset):
    def __init__(self, size, places=None):
        self.x, self.places = torch.randn(size, 6), places
        self.y = self.x[:, :3].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.01 * torch.randn(6), self.y[index]


class Count(Callback):
    """Count steps, and keep what the worker sees."""

    def __init__(self):
        self.steps, self.seen = 0, {}

    def on_train_start(self, state):
        self.seen = {"cwd": str(Path.cwd()), "argv": sys.argv, "file": __name__}

    def on_step_end(self, state, result):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps, "seen": self.seen}

    def load_state_dict(self, state):
        self.steps, self.seen = state["steps"], state["seen"]


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
count = Count()
trainer = Trainer(
    net,
    {"hidden": 16, "batch_size": 8},
    optimizer=optimizer,
    scheduler=scheduler,
    loss_fn=lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets),
    metrics={"right": lambda outputs, targets: (outputs.argmax(1) == targets).float()},
    callbacks=[count],
    nproc_per_node=2,
    activation_checkpointing=False,
    gradient_accumulation_steps=2,
    lr_scaling="sqrt",
)
train = DataLoader(
    Points(90), batch_size=6, shuffle=True, num_workers=1, persistent_workers=True, generator=torch.Generator()
)
alive = iter(train)
next(alive)
val = Points(31)
history = trainer.fit(train, val, epochs=3 if MODE == "three" else 2)
trainer.save(f"first-{MODE}.safetensors")
facts |= {"rows": history.rows, "steps": history.steps, "run_dir": history.run_dir, "best": history.best_accuracy,
          "trainer_best": trainer.best_accuracy, "total_time": history.total_time, "frame": len(history.to_pandas()),
          "callback": count.steps, "seen": count.seen}  # fmt: skip
if MODE == "all":
    history.plot("curves.png")
    facts["evaluated"] = [trainer.evaluate(val), trainer.evaluate(val)]
    facts["predicted"] = list(trainer.predict(val).shape)
    facts["checkpoint"] = str(trainer.save("saved"))
if MODE != "three":
    history = trainer.fit(train, val, epochs=1)
    facts |= {"rows": history.rows, "steps": history.steps, "callback": count.steps, "second_run_dir": history.run_dir}
    trainer.save("second.safetensors")
if MODE == "all":
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    other = PyTorchDDPTrainer(
        Net, nproc_per_node=2, epochs=1, checkpoint_dir="checkpoints", seed=3, batch_size=4, gradient_accumulation_steps=2,
        global_batch_size=16,
    )  # fmt: skip
    points = Points(40)
    other.evaluate(points)
    facts["other"] = other.fit(points).run_dir
    facts["other_is_module"] = isinstance(other.model, torch.nn.Module)
    save_file(other.model.state_dict(), "other.safetensors")
    facts["other_checkpoints"] = sorted(map(str, Path("checkpoints").rglob("manifest.json")))
    os.chdir("..")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train_again = trainer.fit(train, epochs=1)
    facts["third"] = [train_again.steps, train_again.run_dir]
Path(f"facts-{MODE}.json").write_text(json.dumps(facts))
