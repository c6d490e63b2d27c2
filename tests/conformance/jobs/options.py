"""Train one or more cases for every option in one process group. Arguments: the directory for the results."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from benchmarks.all_reduces import count_all_reduces
from distributed import Callback, Trainer
from distributed.checkpoints.store import read_state
from tests.conformance.jobs.asking import StopsAfterThree
from tests.conformance.jobs.recording import RANK, WORLD, facts, run_cases, train

SAMPLES, FEATURES, CLASSES, GLOBAL = 44, 6, 4, 12  # four updates an epoch, the last one of 8 samples


def data(sign: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = sign * torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


def data32() -> TensorDataset:
    x, y = data().tensors
    return TensorDataset(x.float(), y)


def net() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES))


class Residual(torch.nn.Module):
    """Count the forward passes of a block with sub-modules."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Residual.forwards += 1
        return x + self.inner(x)


def blocks() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        body = torch.nn.Sequential(Residual(), Residual(), Residual())
        return torch.nn.ModuleDict({"body": body, "head": torch.nn.Linear(FEATURES, CLASSES)})


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["head"](self.parts["body"](x))


class TwoHeads(torch.nn.Module):
    """Have a second head that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = net()
        with torch.random.fork_rng():
            self.unused = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class SecondHeadAtFirst(TwoHeads):
    """Use the second head only in the first slice of an update, whose gradients are not reduced."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.used(x) + self.unused(x) if self.forwards % 3 == 1 else self.used(x)


class Embedded(torch.nn.Module):
    """Look up a code for each sample. Rows of the table that are looked up twice get two gradients.

    There are dense layers above and below the table. torch's own DDP computes wrong gradients for those below.
    """

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.table = torch.nn.Embedding(10, FEATURES, sparse=sparse)
            self.body = torch.nn.Linear(FEATURES, FEATURES)
        self.head = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x) + self.table((x[:, 0] > 0).long() + 3))


def sparse_afterwards() -> dict[str, Any]:
    """Return what a script's own wrapper around the trained model leaves out."""
    model = Embedded(True)
    model._ddp_params_and_buffers_to_ignore = ["head.0.bias"]
    trainers = [Trainer(given, **BASE, max_steps=1) for given in (lambda: Embedded(True), lambda: model)]
    for trainer in trainers:
        trainer.fit(data())
    return {"left out": [vars(t.model).get("_ddp_params_and_buffers_to_ignore") for t in trainers]}


class Twice(torch.nn.Module):
    """Use a layer twice, and recompute it so that its gradient comes in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.shared = torch.nn.Linear(FEATURES, FEATURES)
        self.head = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.clone().requires_grad_()
        for _ in range(2):
            hidden = torch.tanh(torch.utils.checkpoint.checkpoint(self.shared, hidden, use_reentrant=True))
        return self.head(hidden)


def dropping() -> torch.nn.Module:
    return torch.nn.Sequential(net(), torch.nn.Dropout(0.3))


def pair(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    weights = 1.0 + targets.to(outputs.dtype)
    return (torch.nn.functional.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


def deep() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        middle = [part for _ in range(5) for part in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), *middle, torch.nn.Linear(16, CLASSES))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


BASE = {
    "optimizer": sgd, "dtype": "float64", "global_batch_size": GLOBAL, "epochs": 2, "shuffle": False,
    "checkpoint_frequency": None, "log_every_n_steps": 1,
}  # fmt: skip
FP32 = {"dtype": "float32", "data": data32}


def case(model: Any = net, **settings: Any) -> Any:
    """Return a case that trains with these settings over BASE."""

    def run() -> dict[str, Any]:
        merged = {**BASE, **settings}
        source = merged.pop("data", data)()
        val = merged.pop("val", None)
        return train(model, source, val() if val else None, **merged)

    return run


# ---------------------------------------------------------------- rates


def with_objects(schedule: Any, **settings: Any) -> Any:
    """Train with an optimizer and a schedule given as objects."""

    def run() -> dict[str, Any]:
        model = net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return case(model, optimizer=optimizer, scheduler=schedule(optimizer), **settings)()

    return run


def groups(params: Any) -> torch.optim.Optimizer:
    first, *others = params
    return torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": others}], lr=0.1)


def halving(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def by_threes(optimizer: Any) -> Any:
    return StepLR(optimizer, step_size=3, gamma=0.1)


def from_checkpoint(**changes: Any) -> Any:
    """Make four updates with a schedule, and four more with another trainer and other settings."""

    def run() -> dict[str, Any]:
        settings = {**BASE, "scheduler": halving}
        first = Trainer(net, **settings, max_steps=4)
        path = Path(first.fit(data()).run_dir) / "checkpoints" / "step-00000004"
        second = Trainer(net, **{**settings, **changes}, resume_from_checkpoint=str(path))
        return facts(second, second.fit(data()))

    return run


def one_cycle(optimizer: Any) -> Any:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=20, cycle_momentum=False)


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0)


# ---------------------------------------------------------------- precision


class Kinds:
    """Compute a loss, and keep the element types of the outputs."""

    def __init__(self, blow_up_at: int = -1) -> None:
        self.seen: set[str] = set()
        self.calls, self.blow_up_at = 0, blow_up_at

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen.add(str(outputs.dtype))
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        if torch.is_grad_enabled():
            self.calls += 1
            if self.calls == self.blow_up_at and RANK == WORLD - 1:
                return loss * 1e6  # finite, but too large for fp16 after scaling
        return loss


class Weights(Callback):
    """Record the first weight after every update."""

    def __init__(self, trainer: list[Trainer]) -> None:
        self._trainer, self.values = trainer, []

    def on_step_end(self, state: Any, result: Any) -> None:
        first = next(self._trainer[0].model.parameters())
        self.values.append([float(first.detach().flatten()[0]), bool(result.skipped)])


def mixed(blow_up_at: int = -1, **settings: Any) -> Any:
    def run() -> dict[str, Any]:
        loss, box = Kinds(blow_up_at), []
        weights = Weights(box)
        merged = {**BASE, "dtype": "float32", "checkpoint_frequency": 1, **settings}
        trainer = Trainer(net, loss_fn=loss, callbacks=[weights], **merged)
        box.append(trainer)
        history = trainer.fit(data32())
        _, state = read_state(Path(history.run_dir) / "checkpoints" / f"step-{history.steps:08d}")
        seen = {"kinds": sorted(loss.seen), "scaler": state["scaler"], "each": weights.values}
        return {**facts(trainer, history), **seen}

    return run


# ---------------------------------------------------------------- activations, all-reduces


def recomputed(on: bool) -> Any:
    def run() -> dict[str, Any]:
        Residual.forwards = 0
        return {**case(Blocks, activation_checkpointing=on)(), "forwards": Residual.forwards}

    return run


def counted(model: Any = deep, **settings: Any) -> Any:
    """Count the all-reduces of every update, and the buckets of DDP."""

    def run() -> dict[str, Any]:
        trainer = Trainer(model, **{**BASE, "log_every_n_steps": 1000, **settings})
        step, counts, box = trainer.backend.train_step, [], []

        def counting(group: Any) -> Any:
            counts.append([count_all_reduces(lambda: box.append(step(group))), len(group.micro_batches)])
            wrapped = trainer.backend.wrapped
            stats = wrapped._get_ddp_logging_data()
            details.update({key: stats.get(key) for key in ("bucket_sizes", "rebuilt_bucket_sizes", "static_graph")})
            return box.pop()

        details: dict[str, Any] = {}
        trainer.backend.train_step = counting
        history = trainer.fit(data())
        return {**facts(trainer, history), "counts": counts, **details}

    return run


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), float(numpy.random.rand())]


def seed_all() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def among_own_draws() -> dict[str, Any]:
    """Draw random numbers before, between and after the calls of the trainer."""
    seed_all()
    expected = [draws() for _ in range(4)]
    seed_all()
    trainer = Trainer(dropping, **{**BASE, "epochs": 1})
    trainer.evaluate(data())
    seen = [draws()]
    trainer.fit(data())
    seen.append(draws())
    trainer.predict(data())
    trainer.save(OUT / f"own-draws-{WORLD}")
    seen.append(draws())
    history = trainer.fit(data())
    seen.append(draws())
    return {**facts(trainer, history), "drawn": seen, "expected": expected}


def logged_twice() -> dict[str, Any]:
    """Return the lines of metrics.jsonl, without times, of a run with everything that may differ."""
    settings = {"optimizer": None, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2, "shuffle": True}
    seen = case(dropping, dtype="float32", data=data32, **settings)()
    lines = [json.loads(line) for line in Path(seen["run_dir"], "metrics.jsonl").read_text().splitlines()]
    clocks = ("time", "samples_per_second")
    return {**seen, "lines": [{key: row[key] for key in row if key not in clocks} for row in lines]}


class Turns(Callback):
    """Call `step` of a profiler after every step."""

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler

    def on_step_end(self, state: Any, result: Any) -> None:
        self._profiler.step()


def profiled() -> dict[str, Any]:
    """Run `fit` in a user's profiler, with and without a schedule, and count the operators of the model that it saw."""
    counts: dict[str, Any] = {}
    cpu = [torch.profiler.ProfilerActivity.CPU]
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)

    def seen(profiler: Any) -> dict[str, int]:
        return {row.key: row.count for row in profiler.key_averages() if row.key in ("aten::tanh", "TanhBackward0")}

    with torch.profiler.profile(activities=cpu) as whole:
        Trainer(net, **BASE).fit(data())
    counts["whole"] = seen(whole)
    with torch.profiler.profile(
        activities=cpu, schedule=schedule, on_trace_ready=lambda done: counts.update(parts=seen(done))
    ) as parts:
        Trainer(net, callbacks=[Turns(parts)], **BASE).fit(data())
    return counts


def after_each_other() -> dict[str, Any]:
    """Fit twice with one trainer and powersgd, whose memory of the gradients is kept between the fits."""
    trainer = Trainer(deep, **{**BASE, **FP32_DEEP, "epochs": 1, "max_steps": 24, "ddp": POWERSGD})
    trainer.fit(many())
    return facts(trainer, trainer.fit(many(), max_steps=6))


def resumed_powersgd() -> dict[str, Any]:
    """Stop in the middle, and resume from the checkpoint with another trainer."""
    settings = {**BASE, **FP32_DEEP, "ddp": POWERSGD}
    first = Trainer(deep, **{**settings, "max_steps": 24})
    history = first.fit(many())
    path = str(Path(history.run_dir) / "checkpoints" / "step-00000024")
    second = Trainer(deep, **{**settings, "max_steps": 30, "resume_from_checkpoint": path})
    return {**facts(second, second.fit(many())), "files": sorted(p.name for p in Path(path, "comm_hook").glob("*"))}


def spoilt_powersgd() -> dict[str, Any]:
    """Have a NaN after compression began, which the memory of the hook must not keep."""
    x, y = many().tensors
    x[4 * 22] = float("nan")
    box: list[Trainer] = []
    seen = Weights(box)
    settings = {**BASE, **FP32_DEEP, "max_steps": 28, "nan_policy": "skip", "callbacks": [seen]}
    box.append(Trainer(deep, **settings, ddp=POWERSGD))
    history = box[0].fit(TensorDataset(x, y))
    return {**facts(box[0], history), "skipped": [i + 1 for i, (_, skipped) in enumerate(seen.values) if skipped]}


def many() -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(120, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (120,), generator=generator))


POWERSGD = {"comm_hook": "powersgd", "powersgd_start_step": 20}
FP32_DEEP = {"dtype": "float32", "global_batch_size": 4, "log_every_n_steps": 1000, "epochs": 1}


# ---------------------------------------------------------------- the rest


class ToSame(torch.nn.Module):
    """Use an operation that deterministic=True refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.put_(torch.tensor([0, 0]), torch.zeros(2, dtype=x.dtype))
        return self.inner(x)


def deterministic() -> dict[str, Any]:
    try:
        return case(ToSame, deterministic=True)()
    finally:
        torch.use_deterministic_algorithms(False)


def inverted() -> TensorDataset:
    return data(-1)


def unseeded() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES))


def batch_norm() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        norm = torch.nn.BatchNorm1d(8)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), norm, torch.nn.Linear(8, CLASSES))


def validated_by_hand() -> dict[str, Any]:
    trainer = Trainer(batch_norm, **BASE)
    history = trainer.fit(data(), data())
    x, y = data().tensors
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(trainer.model.eval()(x), y)
    return {**facts(trainer, history), "val_by_hand": float(loss)}


def checkpoints(**settings: Any) -> Any:
    def run() -> dict[str, Any]:
        directory = settings.pop("to", None)
        more = {"checkpoint_dir": str(OUT / directory)} if directory else {}
        return case(**{"epochs": 3, "checkpoint_every_n_steps": None, **settings, **more})()

    return run


class StopsInAStep(Callback):
    """Ask to stop on the last rank, in a hook after which no rank waits for another."""

    def on_step_end(self, state: Any, result: Any) -> None:
        if state.step == 2 and RANK == WORLD - 1:
            self.context.stop("asked in step 2")


def by_the_clock(**settings: Any) -> Any:
    """Train until the clock has asked for three validations or checkpoints."""
    return lambda: case(epochs=10**4, log_every_n_steps=10**6, callbacks=[StopsAfterThree()], **settings)()


OUT = Path(sys.argv[1]) if len(sys.argv) > 1 and __name__ == "__main__" else Path()
CASES = {
    "plain": case(),
    "clipped": case(gradient_clipping=0.05),
    "warmed": case(warmup_steps=3),
    "warmed-exponentially": case(warmup_steps=3, warmup_start=0.01),
    "adamw": case(optimizer=None, learning_rate=0.02),
    "set-rate": with_objects(halving, learning_rate=0.02),
    "set-rate-factories": case(scheduler=halving, learning_rate=0.03),
    "set-rate-groups": case(optimizer=groups, learning_rate=0.02),
    "set-rate-resumed": from_checkpoint(learning_rate=0.025),
    "schedule-resumed": from_checkpoint(),
    "schedule-of-another-class": from_checkpoint(scheduler=by_threes),
    "schedule-dropped": from_checkpoint(scheduler=None),
    "linear-default": case(optimizer=None, learning_rate=0.004, lr_scaling="linear", gradient_accumulation_steps=2),
    "sqrt-factory": case(scheduler=by_threes, lr_scaling="sqrt", gradient_accumulation_steps=2),
    "linear-object": with_objects(halving, lr_scaling="linear", gradient_accumulation_steps=2),
    "linear-one-cycle": case(scheduler=one_cycle, lr_scaling="linear", gradient_accumulation_steps=2),
    "per-epoch": case(scheduler=halving, scheduler_interval="epoch"),
    "per-epoch-object": with_objects(halving, scheduler_interval="epoch"),
    "plateau": case(scheduler=plateau, epochs=4, val=inverted),
    "plateau-typo": case(scheduler=plateau, monitor="val_losss", monitor_mode="min", val=data),
    "bf16": mixed(mixed_precision="bf16"),
    "mixed-true": mixed(mixed_precision=True),
    "fp16": mixed(mixed_precision="fp16", scaler_init_scale=256.0, scaler_growth_interval=3),
    "fp16-overflow": mixed(2, mixed_precision="fp16", scaler_init_scale=1024.0, gradient_clipping=10.0),
    "fp32": mixed(),
    "accumulated": case(gradient_accumulation_steps=3),
    "recomputed": recomputed(True),
    "kept": recomputed(False),
    "early": case(epochs=9, early_stopping_patience=2, val=inverted),
    "early-loss": case(epochs=9, early_stopping_patience=1, monitor="loss", monitor_mode="max"),
    "dropping": case(dropping),
    "among-own-draws": among_own_draws,
    "logged-once": logged_twice,
    "logged-twice": logged_twice,
    "profiled": profiled,
    "twice": case(Twice),
    "twice-static": case(Twice, ddp={"static_graph": True}),
    "sparse": case(lambda: Embedded(True), loss_fn=pair, gradient_clipping=0.3, gradient_accumulation_steps=2),
    "dense": case(lambda: Embedded(False), loss_fn=pair, gradient_clipping=0.3, gradient_accumulation_steps=2),
    "max-steps": case(max_steps=5),
    "asked-in-a-step": case(
        epochs=10**4, log_every_n_steps=10**6, checkpoint_frequency=None, callbacks=[StopsInAStep()]
    ),
    "seed-0": case(unseeded, shuffle=True),
    "seed-0-again": case(unseeded, shuffle=True, seed=0),
    "seed-1": case(unseeded, shuffle=True, seed=1),
    "shuffled": case(shuffle=True),
    "float32": case(**FP32),
    "logged-by-threes": case(log_every_n_steps=3),
    "batch-norm": validated_by_hand,
    "by-epochs": checkpoints(checkpoint_frequency=2),
    "by-steps": checkpoints(checkpoint_every_n_steps=5),
    "at-start": checkpoints(checkpoint_at_start=True, checkpoint_frequency=None),
    "validated-by-time": by_the_clock(validate_every_s=0.01, val=inverted, keep_best=False, checkpoint_frequency=None),
    "by-time": by_the_clock(checkpoint_every_s=0.01, checkpoint_frequency=None, keep_latest_k=10_000),
    "elsewhere": checkpoints(checkpoint_frequency=1, to="elsewhere"),
    "newest": checkpoints(checkpoint_frequency=1, epochs=5, keep_latest_k=2, keep_best=False, val=inverted),
    "newest-and-best": checkpoints(checkpoint_frequency=1, epochs=5, keep_latest_k=2, val=inverted),
    "deterministic": deterministic,
    "nondeterministic": case(ToSame),
}
DDP_CASES = {
    "one-bucket": counted(),
    "small-buckets": counted(ddp={"bucket_cap_mb": 0.004}),
    "small-buckets-accumulated": counted(
        ddp={"bucket_cap_mb": 0.004}, global_batch_size=GLOBAL, gradient_accumulation_steps=3
    ),
    "static": counted(ddp={"static_graph": True}),
    "static-accumulated": counted(ddp={"static_graph": True}, gradient_accumulation_steps=3),
    "hook-fp16": case(deep, ddp={"comm_hook": "fp16", "bucket_cap_mb": 0.004}),
    "hook-bf16": case(deep, ddp={"comm_hook": "bf16", "bucket_cap_mb": 0.004}),
    "hook-none": case(deep),
    "hook-powersgd": case(deep, data=many, **FP32_DEEP, max_steps=30, ddp=POWERSGD),
    "powersgd-later": case(deep, data=many, **FP32_DEEP, max_steps=30, ddp=POWERSGD | {"powersgd_start_step": 30}),
    "powersgd-rank-2": case(deep, data=many, **FP32_DEEP, max_steps=30, ddp=POWERSGD | {"powersgd_rank": 2}),
    "powersgd-rank-alone": case(**FP32, ddp={"powersgd_rank": 2}),
    "no-powersgd": case(deep, data=many, **FP32_DEEP, max_steps=30),
    "powersgd-resumed": resumed_powersgd,
    "powersgd-twice": after_each_other,
    "powersgd-spoilt": spoilt_powersgd,
    "powersgd-buckets": case(**FP32, ddp={"comm_hook": "powersgd", "bucket_cap_mb": 1}),
    "sparse-afterwards": sparse_afterwards,
    "unused-found": case(TwoHeads, ddp={"find_unused_parameters": True}),
    "unused-at-last": case(SecondHeadAtFirst, gradient_accumulation_steps=3),
    "unused": case(TwoHeads),  # the last case, because it leaves DDP's reducer unfinished
}

if __name__ == "__main__":
    run_cases(CASES | (DDP_CASES if WORLD > 1 else {}), OUT)
