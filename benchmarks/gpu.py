"""Train a GPT of 124 million parameters on one GPU in bf16: our Trainer, Lightning and Accelerate against a
hand-written loop.

python benchmarks/gpu.py [--quick] [--rounds N]

All contestants live in one process and train in turns on the same data from the same weights. The order rotates from
round to round. A turn is a number of updates and ends when the GPU has finished them. Ratios are taken within a round;
the table shows their median and range. "hand-written again" is a second hand-written loop: its difference is noise.
"host ms" is the CPU time of the training thread. A library that is not installed has no row. Exits with 1 if the goal
is missed by more than noise.

--quick trains a tiny model on any device, also a CPU. It shows that the benchmark runs, not how fast anything is.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import machine
from goals import Goal, verdicts

BASE, AGAIN, OURS = "hand-written", "hand-written again", "Trainer"
LIMIT_X = 1.02  # limit of the wall time of a step, relative to the hand-written loop
RATE, CLIPPING = 3e-4, 1.0


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of the model, the batch and the benchmark."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304  # GPT-2's, rounded up to a multiple of 64
    length: int = 1024
    batch: int = 16
    steps: int = 20  # updates of a turn
    rounds: int = 9  # the first round is warm-up

    @property
    def tokens(self) -> int:
        """Number of tokens of an update."""
        return self.batch * self.length


QUICK = Size(layers=2, width=64, heads=2, vocabulary=256, length=32, batch=4, steps=3, rounds=3)


class Layer(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.first_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.second_norm(x))


class GPT(nn.Module):
    """GPT-2 without dropout. The embedding is also the output layer. The initial weights are always the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def data_of(size: Size) -> TensorDataset:
    """Return as many samples as all turns need."""
    generator = torch.Generator().manual_seed(1)
    samples = size.batch * size.steps * size.rounds
    tokens = torch.randint(0, size.vocabulary, (samples, size.length + 1), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def loader(size: Size, device: torch.device) -> DataLoader[Any]:
    return DataLoader(data_of(size), batch_size=size.batch, pin_memory=device.type == "cuda")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


class Turns:
    """Training in a thread of its own, `steps` updates at a time. The training calls `updated` after each."""

    def __init__(self, train: Callable[[Turns], None], device: torch.device, steps: int) -> None:
        self._train, self._device, self._steps, self._done_steps = train, device, steps, 0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._marks = (0.0, 0.0)
        self._failure: BaseException | None = None
        self.loss: torch.Tensor | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._has_begun = False

    def turn(self) -> tuple[float, float]:
        """Run one turn. Return the mean (wall, CPU of the training thread) seconds of an update."""
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()
        else:
            self._go.release()
        self._done.acquire()
        if self._failure is not None:
            raise self._failure
        return self._marks

    def end(self) -> None:
        """Let the training finish."""
        self._go.release()
        self._thread.join(120)
        if self._failure is not None:
            raise self._failure

    def updated(self, loss: torch.Tensor | None = None) -> None:
        """Record an update. Wait for the next turn if this one is over."""
        if loss is not None:
            self.loss = loss.detach()
        self._done_steps += 1
        if self._done_steps % self._steps:
            return
        self._wait_for_device()
        wall, cpu = time.perf_counter(), time.thread_time()
        self._marks = ((wall - self._began[0]) / self._steps, (cpu - self._began[1]) / self._steps)
        self._done.release()
        self._go.acquire()
        self._began = time.perf_counter(), time.thread_time()

    def _run(self) -> None:
        self._began = time.perf_counter(), time.thread_time()
        try:
            self._train(self)
        except BaseException as error:  # the top frame of a thread: `turn` raises the error to its caller
            self._failure = error
        finally:
            self._done.release()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


# ------------------------------------------------------------------ contestants: (size, device) -> training


def hand_written(size: Size, device: torch.device) -> Callable[[Turns], None]:
    def train(turns: Turns) -> None:
        model = GPT(size).to(device)
        optimizer = adamw(model.parameters())
        for inputs, targets in loader(size, device):
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = next_token_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
            turns.updated(loss)

    return train


def our_trainer(size: Size, device: torch.device) -> Callable[[Turns], None]:
    from distributed import Callback, Trainer

    class Tell(Callback):
        def __init__(self, turns: Turns) -> None:
            self.turns = turns

        def on_step_end(self, state: Any, result: Any) -> None:
            self.turns.updated(result.averages[0][1])

    def train(turns: Turns) -> None:
        ours = Trainer(
            GPT(size), nproc_per_node=1, device=device.type, mixed_precision="bf16", gradient_clipping=CLIPPING,
            optimizer=adamw, loss_fn=next_token_loss, callbacks=[Tell(turns)], verbose=False, epochs=1,
        )  # fmt: skip
        ours.fit(loader(size, device))

    return train


def lightning(size: Size, device: torch.device) -> Callable[[Turns], None]:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self, turns: Turns) -> None:
            super().__init__()
            self.model, self.turns = GPT(size), turns

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            return next_token_loss(self.model(inputs), targets)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.turns.updated(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model.parameters())

    def train(turns: Turns) -> None:
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, precision="bf16-mixed", max_epochs=1,
            gradient_clip_val=CLIPPING, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(turns), loader(size, device))

    return train


def accelerate(size: Size, device: torch.device) -> Callable[[Turns], None]:
    from accelerate import Accelerator

    def train(turns: Turns) -> None:
        accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
        model = GPT(size)
        model, optimizer, batches = accelerator.prepare(model, adamw(model.parameters()), loader(size, device))
        for inputs, targets in batches:
            with accelerator.autocast():
                loss = next_token_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
            turns.updated(loss)

    return train


PEERS = {"lightning": lightning, "accelerate": accelerate}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: shows that it runs (no goal)")
    parser.add_argument("--rounds", type=int, help="rounds, the first of which is warm-up")
    args = parser.parse_args()
    if not args.quick and not torch.cuda.is_available():
        print("no GPU here (--quick tries the benchmark out)", file=sys.stderr)
        return 3
    size = QUICK if args.quick else Size()
    size = dataclasses.replace(size, rounds=args.rounds or size.rounds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peers = {name: make for name, make in PEERS.items() if importlib.util.find_spec(name) is not None}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)  # our Trainer makes its run directory here
        figures, losses = measure(size, device, peers)
        os.chdir("/")
    print(f"{about(size, device)}\n\n{machine.table(rows(size, figures, losses))}\n")
    for name in sorted(PEERS.keys() - peers.keys()):
        print(f"{name} is not installed here")
    goals = goals_of(figures)
    if not args.quick:
        print(f"{verdicts(goals)}\n")
    print(f"{gpu(device)}\n{machine.describe(*peers)}")
    return 0 if args.quick or all(goal.is_met for goal in goals) else 1


def measure(
    size: Size, device: torch.device, peers: dict[str, Any]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
    """Run all rounds. Return name -> (wall, CPU) seconds of an update for each round but the first, and name -> the
    last loss."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # Lightning's advice on loader processes
    makers = {BASE: hand_written, AGAIN: hand_written, OURS: our_trainer, **peers}
    turns = {name: Turns(make(size, device), device, size.steps) for name, make in makers.items()}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for number in range(size.rounds):
        names = list(turns)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds = turns[name].turn()
            if number > 0:
                figures[name].append(seconds)
    losses = {name: float(each.loss) if each.loss is not None else float("nan") for name, each in turns.items()}
    for each in turns.values():
        each.end()
    return figures, losses


def rows(size: Size, figures: dict[str, list[tuple[float, float]]], losses: dict[str, float]) -> list[list[str]]:
    """Return table rows: each contestant compared with the hand-written loop of the same round."""
    out = [["", "step ms", "x", "tokens/s", "host ms", "last loss"]]
    for name, turns in figures.items():
        step = statistics.median(wall for wall, _ in turns)
        host = statistics.median(cpu for _, cpu in turns)
        out.append([
            name, f"{step * 1e3:.2f}", spread(ratios(figures, name)), f"{size.tokens / step:.0f}", f"{host * 1e3:.2f}",
            f"{losses[name]:.4f}",
        ])  # fmt: skip
    return out


def ratios(figures: dict[str, list[tuple[float, float]]], name: str) -> list[float]:
    """Return the wall time divided by that of the hand-written loop, one figure per round."""
    return [own[0] / base[0] for own, base in zip(figures[name], figures[BASE], strict=True)]


def spread(values: list[float]) -> str:
    """Return the values as text, to a thousandth: median (smallest-largest)."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def goals_of(figures: dict[str, list[tuple[float, float]]]) -> list[Goal]:
    return [Goal("a step's wall x", LIMIT_X, ratios(figures, OURS), ratios(figures, AGAIN))]


def about(size: Size, device: torch.device) -> str:
    parameters = sum(p.numel() for p in GPT(size).parameters())
    return (
        f"GPT, {parameters / 1e6:.0f} million parameters, {size.batch} x {size.length} tokens, bf16, AdamW, clipping at {CLIPPING:g},"
        f" one {'GPU' if device.type == 'cuda' else 'CPU (no figures of a GPU)'}; {size.rounds - 1} rounds of {size.steps} updates"
    )


def gpu(device: torch.device) -> str:
    """Return the names and versions of GPU, driver and CUDA."""
    if device.type != "cuda":
        return "no GPU"
    version = Path("/sys/module/nvidia/version")
    driver = version.read_text().strip() if version.exists() else "unknown"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return (
        f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB, driver {driver}, CUDA {torch.version.cuda},"
        f" NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, safetensors {importlib.metadata.version('safetensors')}"
    )


if __name__ == "__main__":
    sys.exit(main())
