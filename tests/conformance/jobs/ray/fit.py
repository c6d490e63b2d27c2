"""Train in a plain script. RayTrainer starts the workers, and the model of this process then has the trained weights."""

import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed import RayTrainer

x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Linear(6, 2)
before = model.weight.detach().clone()


def step(called, batch):
    """Return the loss, and whether FSDP2 has cut the model."""
    outputs = called(batch[0])
    right = (outputs.argmax(1) == batch[1]).double().mean()
    is_cut = float(type(called).__name__.startswith("FSDP"))
    return {"loss": torch.nn.functional.cross_entropy(outputs, batch[1]), "accuracy": right, "is_cut": is_cut}


trainer = RayTrainer(
    model, engine="fsdp", fsdp={"reshard_after_forward": False}, training_step=step, epochs=4, learning_rate=0.1,
    nproc_per_node=2,
)  # fmt: skip
untrained = trainer.evaluate(data)["loss"]  # in this process; the fit still starts Ray
history = trainer.fit(DataLoader(data, batch_size=8, shuffle=True), data)
result = {
    "moved": (model.weight - before).abs().max().item(), "accuracy": trainer.evaluate(data)["accuracy"],
    "gained": untrained - trainer.evaluate(data)["loss"], "best": trainer.best_accuracy, "steps": history.steps, "is_cut": history.rows[-1]["is_cut"],
    "says": json.loads(Path(history.run_dir, "result.json").read_text())["backend"],
}  # fmt: skip
print(json.dumps(result))
