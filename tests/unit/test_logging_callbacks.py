"""Callbacks that log: samples of the model, throughput and MFU, GPUs, histograms; and rates in hooks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from distributed import Callback, Trainer
from distributed.callbacks import (
    DeviceStats,
    ExponentialMovingAverage,
    GradientHistogram,
    SampleImages,
    SampleText,
    ThroughputAndMFU,
)
from distributed.callbacks.throughput import peak_of
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.state import StepResult, TrainState
from tests import event_files
from tests.unit.contexts import a_context
from tests.unit.test_shipped_callbacks import (
    BASE,
    CUT,
    UPDATES,
    Weighed,
    checkpoint_of,
    data,
    net,
    same,
    trained,
    weights,
)

TOKENS = TensorDataset(torch.arange(64).reshape(16, 4) % 8, torch.arange(16) % 8)


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(trainer: Trainer, name: str = "metrics") -> list[dict[str, Any]]:
    assert trainer.history is not None
    return [json.loads(line) for line in (Path(trainer.history.run_dir) / f"{name}.jsonl").read_text().splitlines()]


def media(trainer: Trainer) -> dict[tuple[str, int], bytes]:
    assert trainer.history is not None
    run_dir = Path(trainer.history.run_dir)
    return {(row["name"], row["step"]): (run_dir / row["path"]).read_bytes() for row in rows(trainer, "media")}


# ------------------------------------------------------------------ samples


class Seen:
    """A user's function, which draws numbers and records the mode of the model."""

    def __init__(self) -> None:
        self.modes: list[tuple[bool, bool, bool]] = []
        self.weights: list[Any] = []

    def __call__(self, model: Any, prompts: list[str]) -> list[str]:
        outputs = model(torch.randn(len(prompts), 8, dtype=torch.float64))
        self.modes.append((model.training, model[1].training, outputs.requires_grad))
        self.weights.append(weights(model))
        return [f"{row.sum():.12f}" for row in outputs]


def images(model: Any) -> torch.Tensor:
    return torch.sigmoid(model(torch.randn(2, 8, dtype=torch.float64))).reshape(2, 1, 1, 2)


def sampled(*more: Callback, **settings: Any) -> Trainer:
    return trained(*more, SampleText(["a", "b"], generate=Seen(), every_n_steps=2), SampleImages(images), **settings)


def test_samples_are_logged_and_change_no_number_of_training() -> None:
    alone, beside, seen = Weighed(), Weighed(), Seen()
    one = trained(alone)
    other = trained(beside, SampleText(["a", "b"], generate=seen, every_n_steps=2), SampleImages(images))
    assert all(same(a, b) for a, b in zip(alone.seen, beside.seen, strict=True)) and same(
        weights(one.model), weights(other.model)
    )
    assert one.history is not None and other.history is not None
    assert [row["val_loss"] for row in one.history.rows] == [row["val_loss"] for row in other.history.rows]
    assert all(torch.equal(a, b) for a, b in zip(one.model.buffers(), other.model.buffers(), strict=True))
    found = media(other)
    texts = [step for name, step in found if name == "samples"]
    assert texts == [2, 4, 6, 8, 10, 12] and seen.modes == [(False, False, False)] * 6
    assert sorted(step for name, step in found if name == "samples/1") == [4, 8, 12]
    first, second = (found["samples", step].decode() for step in (2, 4))
    assert first.startswith("> a\n") and "\n\n> b\n" in first and first != second
    assert found["samples/0", 4].startswith(b"\x89PNG")


@pytest.mark.parametrize("cut", [CUT, 8])
def test_a_resumed_run_logs_the_same_samples(cut: int) -> None:
    whole, again = Weighed(), Weighed()
    one = sampled(whole)
    cut_off = sampled(max_steps=cut)
    other = sampled(again, resume_from_checkpoint=str(checkpoint_of(cut_off, cut)))
    assert all(same(a, b) for a, b in zip(whole.seen[cut:], again.seen, strict=True))
    assert media(one) == {**media(cut_off), **media(other)} and len(media(one)) == 6 + 2 * 3


def test_samples_are_of_the_averaged_weights_as_a_validation_is() -> None:
    seen = Seen()
    trainer = trained(ExponentialMovingAverage(0.9), SampleText(["a"], generate=seen))
    assert same(seen.weights[-1], weights(trainer.model)) and not same(seen.weights[0], seen.weights[-1])


def test_the_mode_of_each_module_is_as_before_also_after_an_error() -> None:
    class Fails(Callback):
        def on_step_end(self, state: Any, result: Any) -> None:
            model = self.context.model
            model[1].eval()
            before = torch.get_rng_state()
            with pytest.raises(ZeroDivisionError):
                self._fail(model)
            assert (model.training, model[0].training, model[1].training) == (True, True, False)
            assert torch.equal(before, torch.get_rng_state()) and torch.is_grad_enabled()

        def _fail(self, model: Any) -> None:
            with self.context.observer.sampling(1):
                torch.randn(3)
                model.train()
                raise ZeroDivisionError

    trained(Fails(), max_steps=1)


def test_samples_of_fixed_inputs_in_the_element_type_of_the_run() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.Sigmoid())
    x = torch.rand(8, 1, 4, 4)
    trainer = Trainer(model, callbacks=[SampleImages(inputs=x[:3], name="restored")], **{**BASE, "epochs": 1})
    trainer.fit(TensorDataset(x, x.expand(8, 3, 4, 4)))
    assert [name for name, _ in media(trainer)] == ["restored/0", "restored/1", "restored/2"]


def test_a_hugging_face_model_goes_on_from_prompts() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=16, bos_token_id=0, eos_token_id=7
    )

    class Tokenizer:
        def __call__(self, text: str, return_tensors: str) -> dict[str, Any]:
            ids = torch.tensor([[int(letter) for letter in text]])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
            return "".join(str(int(token)) for token in tokens)

    def run(*callbacks: Callback) -> Trainer:
        torch.manual_seed(0)
        batches = [{"input_ids": row, "labels": row} for row in TOKENS.tensors[0]]
        trainer = Trainer(
            lambda: transformers.GPT2LMHeadModel(config),
            callbacks=list(callbacks),
            **{**BASE, "epochs": 1, "dtype": "float32"},
        )
        trainer.fit(batches)
        return trainer

    options = {"max_new_tokens": 5, "do_sample": True, "pad_token_id": 7, "eos_token_id": None}
    one, other = run(), run(SampleText(["123", "45"], tokenizer=Tokenizer(), **options))
    assert same(weights(one.model), weights(other.model))
    lines = media(other)["samples", 1].decode().splitlines()
    assert lines[::3] == ["> 123", "> 45"] and [len(text) for text in lines[1::3]] == [5, 5]


def started(callback: Callback, **settings: Any) -> None:
    Callback._bind(callback, a_context(config=DistributedConfig(**settings)))
    callback.on_train_start(TrainState())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SampleText("once", generate=print), r"SampleText\(prompts='once'\) needs a list of texts"),
        (
            lambda: SampleText(["a"], tokenizer=print, num_return_sequences=2),
            "num_return_sequences=2 of SampleText generates 2 texts per prompt, but only one is logged: drop it",
        ),
        (lambda: SampleText(["once"]), "SampleText needs a tokenizer, .* or generate=function"),
        (lambda: SampleText(["once"], generate=print, max_new_tokens=3), "max_new_tokens: arguments of the model's generate"),
        (lambda: SampleImages(), "SampleImages needs a function"),
        (lambda: SampleImages(images, every_n_steps=0), "every_n_steps=0 must be 1 or more"),
        (lambda: trained(SampleText(["a"], tokenizer=print)), r"a Sequential has no generate\(\): pass generate=function"),
        (lambda: trained(SampleText(["a"], generate=lambda model, prompts: "b")), "returned 'b' for 1 prompts: return a list"),
        (lambda: trained(SampleImages(lambda model: torch.ones(2, 5, 5))), r"got shape \[2, 5, 5\]: return images of shape"),
        (lambda: ThroughputAndMFU(peak_flops=0), "peak_flops=0 must be above 0"),
        (lambda: started(ThroughputAndMFU(), compile=True), "cannot count the FLOPs of a model with compile=True"),
        (lambda: GradientHistogram(0), "every_n_steps=0 must be 1 or more"),
        (lambda: trained(GradientHistogram()), "GradientHistogram has no effect without TensorBoard: set tensorboard=True"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ------------------------------------------------------------------ throughput


class Noticed(Callback):
    """Record the notices of other callbacks of the fit."""

    def __init__(self, *others: Callback) -> None:
        self.others = others
        self.texts: list[str] = []

    def on_train_start(self, state: Any) -> None:
        for other in self.others:
            context = other.context
            Callback._bind(other, type(context)(**{**vars(context), "notice": self.texts.append}))


def net_of_tokens() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Flatten(), torch.nn.Linear(64, 8))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_flops_are_those_that_torch_counts_and_rates_are_per_second_of_training(accumulation: int) -> None:
    model = net_of_tokens()
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(model(TOKENS.tensors[0]), TOKENS.tensors[1]).backward()
    throughput = ThroughputAndMFU(peak_flops=1e9)
    noticed = Noticed(throughput)
    settings = {
        **BASE,
        "dtype": "float32",
        "global_batch_size": 8,
        "log_every_n_steps": 1,
        "epochs": 2,
        "gradient_accumulation_steps": accumulation,
    }
    trainer = Trainer(net_of_tokens, callbacks=[noticed, throughput], **settings)
    trainer.fit(TOKENS)
    assert trainer.history is not None
    per_sample = counter.get_total_flops() / 16
    assert noticed.texts == [f"the model needs {per_sample:.4g} FLOPs per sample, {8 * per_sample:.4g} per update"]
    for row in [*rows(trainer), *trainer.history.rows]:
        assert row["tokens_per_second"] == pytest.approx(4 * row["samples_per_second"])
        assert row["flops_per_second"] == pytest.approx(per_sample * row["samples_per_second"])
        assert row["mfu"] == pytest.approx(row["flops_per_second"] / 1e9)


def test_counting_changes_no_number_and_a_resumed_run_does_not_count_again() -> None:
    alone, beside, again = Weighed(), Weighed(), Weighed()
    trained(alone)
    cut_off = trained(beside, ThroughputAndMFU(), max_steps=CUT)
    resumed = ThroughputAndMFU(peak_flops=1.0)
    noticed = Noticed(resumed)
    trained(again, noticed, resumed, resume_from_checkpoint=str(checkpoint_of(cut_off, CUT)))
    assert all(same(a, b) for a, b in zip(alone.seen, [*beside.seen, *again.seen], strict=True))
    assert noticed.texts == [] and len(alone.seen) == UPDATES


def test_flops_of_several_models_are_counted_unless_their_batches_are_cut() -> None:
    def step(models: Any, batch: Any, update: Any) -> None:
        update("a", models["b"](models["a"](batch[0])).square().mean())

    def run(**settings: Any) -> float:
        counting = ThroughputAndMFU(peak_flops=1.0)
        models = {"a": lambda: torch.nn.Linear(8, 4), "b": lambda: torch.nn.Linear(4, 2)}
        given = {**BASE, "max_steps": 1, **settings}
        Trainer(models=models, optimizers={"a": "sgd"}, training_step=step, callbacks=[counting], **given).fit(data())
        return counting.state_dict()["per_sample"]

    assert run() == 2 * (8 * 4 + 4 * 2) + 2 * (
        8 * 4 + 4 * 2
    )  # the frozen one has no gradient of weights, `a` none of inputs
    with pytest.raises(ConfigError, match="cannot count the FLOPs of several models with gradient accumulation"):
        run(gradient_accumulation_steps=2)


def test_recomputed_passes_are_not_counted() -> None:
    class Blocks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.Sequential(
                *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
            )

        def forward(self, x: torch.Tensor) -> Any:
            return self.blocks(x)

    def flops(is_recomputed: bool) -> float:
        counting = ThroughputAndMFU(peak_flops=1.0)
        trainer = Trainer(
            Blocks, callbacks=[counting], activation_checkpointing=is_recomputed, **{**BASE, "max_steps": 1}
        )
        trainer.fit(data())
        return counting.state_dict()["per_sample"]

    assert (
        flops(True) == flops(False) == 3 * 3 * 2 * 8 * 8 - 2 * 8 * 8
    )  # the first layer needs no gradient of its inputs


def test_without_a_known_peak_there_is_no_mfu_which_is_said_once() -> None:
    throughput = ThroughputAndMFU(flops_per_sample=100.0)
    shown: list[str] = []
    on_gpu = SimpleNamespace(
        device_name="NVIDIA H100 80GB HBM3", computes_in="bfloat16", count_updates=lambda counts_flops: None
    )
    for device, kind, text in (
        ("", "float32", "no mfu is logged: the peak of CPUs is not known; ThroughputAndMFU(peak_flops=...) gives it"),
        ("NVIDIA T4", "bfloat16", "no mfu is logged: the peak of bfloat16 on NVIDIA T4 is not known; "),
        ("NVIDIA H100 80GB HBM3", "float32", "no mfu is logged: the peak of float32 on NVIDIA H100 80GB HBM3 is not known; "),
    ):  # fmt: skip
        on_gpu.device_name, on_gpu.computes_in = device, kind
        Callback._bind(throughput, a_context(observer=on_gpu, notice=shown.append))
        throughput.on_train_start(TrainState())
        assert len(shown) == 1 and shown.pop().startswith(text)
    on_gpu.computes_in = "float16"
    throughput.on_train_start(TrainState())
    assert not shown
    trainer = trained(ThroughputAndMFU(flops_per_sample=100.0))
    assert trainer.history is not None
    assert "flops_per_second" in trainer.history.rows[-1] and "mfu" not in trainer.history.rows[-1]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None), ("NVIDIA GH200 480GB", 989e12), ("NVIDIA L4", 121e12), ("NVIDIA RTX A4000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_found_by_the_words_of_its_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_rate_outside_of_an_update_is_refused() -> None:
    class Rates(Callback):
        def on_epoch_end(self, state: Any, metrics: Any) -> None:
            self.context.log_rate("words", 3)

    with pytest.raises(
        ConfigError, match=r"log_rate\('words', \.\.\.\) was called outside of an update: call it in on_step_end"
    ):
        trained(Rates())


# ------------------------------------------------------------------ GPUs and histograms


def test_the_figures_of_gpus_join_the_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.callbacks.gpus.Gpus.missing", lambda gpus: "")
    monkeypatch.setattr("distributed.callbacks.gpus.Gpus.read", lambda gpus: {"gpu/utilization_0": 50.0})
    trainer = trained(DeviceStats(), log_every_n_steps=2, epochs=1)
    assert trainer.history is not None and trainer.history.rows[0]["gpu/utilization_0"] == 50.0
    assert [row["gpu/utilization_0"] for row in rows(trainer) if row["split"] == "train"] == [50.0, 50.0]


def test_without_gpus_a_notice_says_that_nothing_is_logged() -> None:
    shown: list[str] = []
    stats = DeviceStats()
    Callback._bind(stats, a_context(notice=shown.append))
    stats.on_train_start(TrainState())
    stats.on_step_end(TrainState(step=50), StepResult([]))
    assert shown == ["DeviceStats logs nothing: this run uses no GPUs"]


def histograms(trainer: Trainer) -> list[int]:
    assert trainer.history is not None
    board = event_files.read(Path(trainer.history.run_dir) / "tensorboard")
    return [event.step for event in board.Histograms("gradients/0.weight")]


def test_histograms_are_written_each_few_updates_and_once_after_a_resume(tmp_path: Path) -> None:
    for given, steps in (({}, [2, 4, 6, 8, 10, 12]), ({"tensorboard_histograms": True}, [2, 4, 6, 8, 10, 12])):
        run = {"tensorboard": True, "max_steps": 6, "checkpoint_dir": str(tmp_path / f"c{len(given)}"), **given}
        trainer = Trainer(net, callbacks=[GradientHistogram(every_n_steps=2)], **{**BASE, **run})
        trainer.fit(data())
        assert histograms(trainer) == steps[:3]
        trainer.fit(data(), max_steps=6)
        assert histograms(trainer) == steps
    assert histograms(trained(GradientHistogram(), tensorboard=True)) == [4, 8, 12]
