"""Training script of the conformance suite: train every case one after the other on the backend that it was started
with.

    cases.py OUT ASKED

ASKED is JSON: `model` ("torch" or "keras"), `dtypes`, `refused` (cases to leave out), `kinds` ("bf16", "fp16",
"compile": cases to add), and `reference`, which adds the cases that only a reference of one process needs.

For each case, OUT/DTYPE gets NAME.npz (losses and other numbers to compare), NAME.safetensors (the weights) and
NAME-RANK.json (what each rank saw). It also gets `source/`, the checkpoint of a run that was cut off in the middle of
an epoch; OUT/float32 always gets one. The cases in float32, bfloat16 and float16 are in the directory of the last
DTYPE.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy

from distributed import Callback, Trainer, load_predictions
from distributed.callbacks import ExponentialMovingAverage, Freeze, SampleText, ThroughputAndMFU
from distributed.testing.jobs import overall

GLOBAL, RATE = 22, 1e-2
UPDATES_PER_EPOCH, CUT_OFF = 5, 7  # the second update of the second epoch
STOP_REASON = "the last rank has seen enough"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CLIP = 0.05
EXPECTED = ("val_auroc", "val_f1", "val_order", "val_perplexity", f"val_{overall.FOUND_OUT}")
BASE: dict[str, Any] = {
    "epochs": 3,
    "global_batch_size": GLOBAL,
    "learning_rate": RATE,
    "checkpoint_frequency": None,
    "seed": 3,
}


AVERAGED: dict[str, Any] = {
    "callbacks": [lambda: ExponentialMovingAverage(0.8, warmup=True)], "validate_every_n_steps": 2,
}  # fmt: skip


def parts_of(model: str) -> Any:
    """Return the module with the models, losses and data of the kind `model`, "torch" or "keras"."""
    return importlib.import_module(f"distributed.testing.jobs.{model}_parts")


def resumable(parts: Any) -> dict[str, Any]:
    """Return settings that use everything that a resume has to restore."""
    return {
        "scheduler": parts.cosine, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2, "optimizer": parts.adamw,
        "model": parts.smooth, "learning_rate": None, "metrics": parts.metrics(), "validate_every_n_steps": 2,
    }  # fmt: skip


def cases(parts: Any) -> dict[str, dict[str, Any]]:
    """Return the cases in which every backend and world size must produce the same numbers."""
    own = {"optimizer": parts.sgd, "learning_rate": None}
    return {
        "adamw": {},
        "sgd-schedule-clip-warmup": {**own, "scheduler": parts.cosine, "gradient_clipping": 0.5, "warmup_steps": 4},
        "accumulation": {"gradient_accumulation_steps": 3},
        "accumulation-clip": {"gradient_accumulation_steps": 2, "optimizer": parts.sgd, "gradient_clipping": 0.1},
        "sum-count": {"loss_fn": parts.pair_loss, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
        "unreduced": {"loss_fn": parts.unreduced},
        "tiny-last": {"global_batch_size": 50, "gradient_accumulation_steps": 2},  # the last update has one sample
        "empty-slices": {"global_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 40},  # fewer samples than slices
        "stream": {"data": "stream"},
        "class-weights": {**parts.weighing(), "gradient_accumulation_steps": 2},
        "ignored": {**parts.ignoring(), "gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
        "epoch-schedule": {**own, "scheduler": parts.halving, "scheduler_interval": "epoch"},
        # The learning rate equals RATE after scaling.
        "scaled-rate": {"lr_scaling": "linear", "learning_rate": RATE * -(-GLOBAL // WORLD) / GLOBAL},
        "in-order": {"shuffle": False, "seed": 4},
        "kept": {"model": parts.counted},
        "recomputed": {"activation_checkpointing": True, "model": parts.counted},
        "repeatable": {"deterministic": True, "model": parts.smooth},
        "left-out": {**parts.poisoned(), "nan_policy": "skip", "max_steps": 6},
        "stopped-early": {"epochs": 9, "early_stopping_patience": 1, "val": -1},
        "stopped-by-one": {"stop_at": CUT_OFF},
        "named": {
            "optimizer": "adamw", "weight_decay": 0.3, "betas": (0.8, 0.9), "scheduler": "cosine", "warmup_steps": 4,
            "min_learning_rate": 1e-3,
        },
        "named-sgd": {"optimizer": "sgd", "momentum": 0.9, "scheduler": "wsd", "scheduler_decay_ratio": 0.5},
        "validation-points": {
            "sets": True, "validate_every_n_steps": 3, "validate_at_start": True, "max_validation_batches": 1,
            "monitor": "val_other_loss", "early_stopping_patience": 3,
        },
        "averaged": {**AVERAGED, **own},
        "frozen": {"callbacks": [FreezesFirst], **own, "gradient_clipping": 0.5},
        "sampled": {"callbacks": [lambda: SampleText(["sum"], generate=parts.sampled, every_n_steps=2), ThroughputAndMFU]},
        "several": {
            "several": True, "learning_rate": None, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "warmup_steps": 4,
            "monitor": "val_critic_loss",
        },
        "whole": resumable(parts),
    }  # fmt: skip


def measured_columns(metrics: Iterable[str]) -> list[str]:
    """Return the names of the metrics over all samples in a row."""
    names = sorted(metrics)
    return [*names, *(f"val_{name}" for name in names)]


class FreezesFirst(Freeze):
    """Leave the first parameter out of the updates of the first epoch."""

    def __init__(self) -> None:
        super().__init__("the first", until_epoch=1)

    def on_train_start(self, state: Any) -> None:
        self.names = (self.context.named_parameters()[0][0],)
        super().on_train_start(state)


class Watch(Callback):
    """Record what the loop passes to the callbacks of this rank."""

    def __init__(self, parts: Any, stop_at: int | None) -> None:
        self.context_of_start: Any = None
        self.logged: list[Any] = []
        self.skipped: list[int] = []
        self.is_deterministic = False
        self._parts, self._stop_at = parts, stop_at

    def on_train_start(self, state: Any) -> None:
        self.context_of_start = self.context

    def on_log(self, state: Any, split: str, metrics: Mapping[str, float]) -> None:
        loss = metrics["other_loss" if "other_loss" in metrics else "loss"]
        self.logged.append([split, state.step, loss, metrics.get("grad_norm", 0.0)])
        if state.step == self._stop_at and RANK == WORLD - 1:
            self.context.stop(STOP_REASON)

    def on_step_end(self, state: Any, result: Any) -> None:
        self.skipped += [state.step] * result.skipped
        self.is_deterministic = self._parts.is_deterministic()


class Cases:
    """Train cases and write their results."""

    def __init__(self, parts: Any, out: Path, dtype: str, refused: Iterable[str] = ()) -> None:
        self.parts, self.out, self.dtype, self.refused = parts, out, dtype, refused

    def __call__(self, name: str, only_weights: bool = False, **case: Any) -> None:
        """Train the case. Unless only its weights are compared, also validate, evaluate and predict."""
        settings = {"model": self.parts.model, "dtype": self.dtype, "log_every_n_steps": 1, **BASE, **case}
        kind, sign, dtype = settings.pop("data", ""), settings.pop("val", 1), settings["dtype"]
        built = settings.pop("model")
        if settings.pop("several", False):
            built, settings = None, settings | self.parts.several()
        if settings["learning_rate"] is None:
            del settings["learning_rate"]
        training = self.parts.samples(dtype, kind)
        validation = None if only_weights else self.parts.samples(dtype, kind, sign)
        if settings.pop("sets", False):
            validation = {"same": validation, "other": self.parts.samples(dtype, kind, -1)}
        watch = Watch(self.parts, settings.pop("stop_at", None))
        before = self.parts.counts()
        more = [make() for make in settings.pop("callbacks", ())]
        trainer = Trainer(built, callbacks=[watch, *more], **settings)
        history = trainer.fit(self.parts.source(dtype, kind), validation)
        counts = {what: count - before[what] for what, count in self.parts.counts().items()}
        after: dict[str, Any] = {}
        if not only_weights:
            again = trainer.evaluate(training)
            columns = measured_columns(settings.get("metrics", ()))
            rows = [[row[name] for name in columns] for row in history.rows]
            predicted = self.parts.numbers(self._predicted(trainer, dtype))
            expected = overall.expected(predicted, self.parts.classes(dtype))
            after = {
                "predicted": predicted,
                "again": again["loss"],
                "accuracy": again["accuracy"],
                "measured": rows,
                "columns": columns,
            }
            after["expected"] = [expected[name.removeprefix("val_")] for name in EXPECTED]
            after["found"] = [history.rows[-1].get(name, 0.0) for name in EXPECTED]
        # the file is complete; trainer.model may hold only this rank's part
        trainer.save(self.out / f"{name}.safetensors")
        context = watch.context_of_start
        seen = {
            "context": [
                context.model is trainer.model,
                context.optimizer is not None,
                context.run_dir.samefile(history.run_dir),
            ],
            "logged": watch.logged,
            "skipped": watch.skipped,
            "stop_reason": history.stop_reason,
            "run_dir": history.run_dir,
            "deterministic": watch.is_deterministic,
            **counts,
        }
        (self.out / f"{name}-{RANK}.json").write_text(json.dumps(seen))
        if trainer.is_main_process:
            numpy.savez(
                self.out / f"{name}.npz", steps=history.steps, **after, loss=[row.get("loss", 0.0) for row in history.rows],
                val_loss=[[row[key] for key in row if key.startswith("val_") and key.endswith("loss")] for row in history.rows],
                norms=[norm for split, _, _, norm in watch.logged if split == "train"],
            )  # fmt: skip

    def _predicted(self, trainer: Trainer, dtype: str) -> Any:
        data = self.parts.samples(dtype)
        if trainer.job.names:
            return self.parts.predicted_by_several(trainer.model, data)
        predicted = trainer.predict(data)
        written = load_predictions(trainer.predict(data, out=self.out / "predicted", force=True))
        numpy.testing.assert_array_equal(self.parts.numbers(written), self.parts.numbers(predicted))
        return predicted

    def _one(self) -> dict[str, Any]:
        """Return settings for one update of plain SGD at rate 1, which changes the weights by the applied gradient."""
        return {
            "optimizer": self.parts.plain_sgd, "learning_rate": None, "max_steps": 1, "model": self.parts.same_weights
        }  # fmt: skip

    def clipped(self) -> None:
        self("one-update", **self._one())
        self("one-clipped-update", **self._one(), gradient_clipping=CLIP)

    def cut_off(self) -> None:
        """Train a run that stops in the middle of an epoch."""
        self("cut-off", **resumable(self.parts), max_steps=CUT_OFF, checkpoint_dir=str(self.out / "source"))

    def resumed(self) -> None:
        """Resume the run of `cut_off` with another trainer, start from its weights, and resume runs with named settings, with several
        validation sets, and with averages."""
        self("resumed", **resumable(self.parts), resume_from_checkpoint=self._cut_off_in("source"))
        source = self._cut_off_in("source")
        self("started-from", **{**resumable(self.parts), "max_steps": UPDATES_PER_EPOCH}, init_from=source)
        named: dict[str, Any] = {**cases(self.parts)["named"], "only_weights": True}
        where = str(self.out / "named-source")
        length = UPDATES_PER_EPOCH * BASE["epochs"]
        self("named-cut-off", **named, scheduler_steps=length, max_steps=CUT_OFF, checkpoint_dir=where)
        self("named-resumed", **named, resume_from_checkpoint=self._cut_off_in("named-source"))
        points = cases(self.parts)["validation-points"]
        self("points-cut-off", **points, max_steps=CUT_OFF, checkpoint_dir=str(self.out / "points-source"))
        self("points-resumed", **points, resume_from_checkpoint=self._cut_off_in("points-source"))
        if "averaged" not in self.refused:
            averaged = cases(self.parts)["averaged"]
            self("averaged-cut-off", **averaged, max_steps=CUT_OFF, checkpoint_dir=str(self.out / "averaged-source"))
            self("averaged-resumed", **averaged, resume_from_checkpoint=self._cut_off_in("averaged-source"))

    def several_resumed(self) -> None:
        """Resume a run of several models that was cut off."""
        several: dict[str, Any] = {**cases(self.parts)["several"], "only_weights": True, "monitor": "loss"}
        where = str(self.out / "several-source")
        self("several-cut-off", **several, max_steps=CUT_OFF, checkpoint_dir=where)
        self("several-resumed", **several, resume_from_checkpoint=self._cut_off_in("several-source"))

    def _cut_off_in(self, directory: str) -> str:
        (checkpoint,) = (self.out / directory).rglob(f"step-{CUT_OFF:08d}")
        return str(checkpoint)

    def mixed(self) -> None:
        """Train in bfloat16: one update, and a full training run."""
        self("bf16-update", **self._one(), only_weights=True, dtype="float32", mixed_precision="bf16")
        self("bf16", dtype="float32", model=self.parts.smooth, mixed_precision="bf16")

    def scaled(self) -> None:
        """Train in float16, with a loss scale that doubles every third update."""
        half: dict[str, Any] = {"mixed_precision": "fp16", "scaler_init_scale": 256.0, "scaler_growth_interval": 3}
        self("fp16", dtype="float32", model=self.parts.smooth, checkpoint_frequency=1, **half)

    def compiled(self) -> None:
        """Train with the graphs that torch.compile traces from the engine's wrapper. Their operations run eagerly, so no
        compiler is needed."""
        with self.parts.compiling():
            self("compiled", model=self.parts.smooth, compile=True)

    def unmixed(self) -> None:
        """Train the cases of `mixed` in float32, and one update at twice the rate, from which the gradient follows."""
        self("float32-update", **self._one(), only_weights=True, dtype="float32")
        self("float32-double-update", **(self._one() | {"learning_rate": 2.0}), only_weights=True, dtype="float32")
        self("float32", dtype="float32", model=self.parts.smooth)

    def in_float32(self, is_reference: bool) -> None:
        """Train in float32. The reference also cuts its batches into slices: that difference is the tolerance."""
        for seed in range(4):
            case: dict[str, Any] = {"seed": seed, "epochs": 4, "dtype": "float32", "only_weights": True}
            self(f"fp32-{seed}", **case)
            for cut in (2, 3, 4) if is_reference else ():
                self(f"fp32-{seed}-cut-{cut}", **case, gradient_accumulation_steps=cut)


def freeze() -> None:
    """Exclude imported objects from the garbage collection at the end of each fit, which would take a fifth of a
    second."""
    gc.collect()
    gc.freeze()


def main(out: Path, asked: dict[str, Any]) -> None:
    parts = parts_of(asked["model"])
    parts.metrics()  # import torchmetrics now
    freeze()
    for dtype in asked["dtypes"]:
        (out / dtype).mkdir(exist_ok=True)
        fits = Cases(parts, out / dtype, dtype, asked["refused"])
        for number, (name, case) in enumerate(cases(parts).items()):
            if name not in asked["refused"]:
                fits(name, **case)
            if number == 0:
                freeze()  # the first fit imports more
        fits.clipped()
        fits.cut_off()
        fits.resumed()
        if "several" not in asked["refused"]:
            fits.several_resumed()
    if "compile" in asked["kinds"]:
        fits.compiled()
    if "bf16" in asked["kinds"]:
        fits.mixed()
    if "fp16" in asked["kinds"]:
        fits.scaled()
    if asked["reference"]:
        fits.unmixed()
    fits.in_float32(asked["reference"])
    if "float32" not in asked["dtypes"]:  # backends without float64 resume a checkpoint in float32
        (out / "float32").mkdir(exist_ok=True)
        Cases(parts, out / "float32", "float32").cut_off()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
