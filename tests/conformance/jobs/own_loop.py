"""Train with a loop of this script. Writes the final weights, and what each rank has gathered of the evaluation data.

Arguments: the directory for the results, and options as JSON: `settings`; `dropout`; `signal` and `step`, to send a signal to the last
rank at that step of the first attempt; `nproc`, to start the workers with `distributed.launch`, and
`launch`, its further settings.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import distributed

SETTINGS = {
    "epochs": 2, "global_batch_size": 16, "shuffle": True, "seed": 5, "gradient_clipping": 0.5, "checkpoint_every_n_steps": 3,
    "log_every_n_steps": 4, "restart_on_exception": False,
}  # fmt: skip
generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(101, 6, generator=generator)
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())
EVALUATION = TensorDataset(torch.arange(13).unsqueeze(1))


def make(dropout=0.0):
    torch.manual_seed(2)
    layers = [
        torch.nn.Linear(6, 600),
        torch.nn.Tanh(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(600, 600),
        torch.nn.Tanh(),
    ]
    return torch.nn.Sequential(*layers, torch.nn.Linear(600, 2))


def make_optimizer(params):
    return torch.optim.Adam(params, lr=3e-3)


def train(out, options):
    with distributed.Session(**{**SETTINGS, **options.get("settings", {})}) as s:
        model = make(options.get("dropout", 0.0))
        loaders = DataLoader(DATA), DataLoader(EVALUATION, batch_size=2)
        called, _, loader, evaluation = s.prepare(model, make_optimizer, *loaders)
        start = s.resume()
        for _ in s.epochs():
            for inputs, targets in loader:
                if s.step == 1:
                    expected = s.gather(inputs)
                    for _ in evaluation:
                        pass
                    assert torch.equal(s.gather(inputs), expected)
                s.backward(F.cross_entropy(called(inputs), targets))
                s.update()
                is_first = start.step == 0 and s.rank == s.world_size - 1
                if is_first and s.step == options.get("step"):
                    os.kill(os.getpid(), getattr(signal, options["signal"]))
            for (rows,) in evaluation:
                s.log("test_mean", rows.double().mean())
            s.log("val_first", torch.cat([s.gather(rows) for (rows,) in evaluation]).flatten()[0] + 1)
        gathered = torch.cat([s.gather(rows) for (rows,) in evaluation]).flatten().tolist()
        Path(out, f"gathered-{s.rank}.json").write_text(json.dumps([start.step, gathered]))
        s.save(Path(out, "weights.safetensors"))


if __name__ == "__main__":
    out, options = sys.argv[1], json.loads(sys.argv[2])
    if "nproc" in options:
        settings = {"nproc_per_node": options["nproc"], "dtype": "float64", **options.get("launch", {})}
        distributed.launch(train, out, options, **settings)
    else:
        train(out, options)
