"""One process on one GPU: its numbers, its precisions, and a bit-identical resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from gpu_support import (
    DEVICE,
    REHEARSAL,
    TOO_MUCH,
    During,
    Net,
    checkpoint,
    data,
    distance,
    loader,
    resumed,
    saved,
    sgd,
    trainer,
    weights,
)
from torch import nn

import distributed
from distributed import Callback
from distributed.callbacks import DeviceStats, ExponentialMovingAverage, ThroughputAndMFU


def test_training_on_the_device_learns_and_gives_the_numbers_of_a_cpu():
    models = {}
    for device in dict.fromkeys((DEVICE, "cpu")):
        model = Net(has_norm=True)
        history = trainer(model, epochs=3, dtype="float64", device=device).fit(loader(), data(96))
        assert history.rows[-1]["loss"] < 0.5 * history.rows[0]["loss"] and history.best_accuracy > 0.6
        assert {p.device.type for p in model.parameters()} == {device}
        models[device] = weights(model)
    assert distance(models[DEVICE], models["cpu"]) < 1e-9


def test_predictions_have_arrived_when_predict_returns():
    model = Net(width=512)
    ours = trainer(model, epochs=1)
    ours.fit(loader())
    size = 200 if REHEARSAL else 20_000
    inputs = data(3 * size).tensors[0]
    outputs = ours.predict(torch.utils.data.DataLoader(inputs, batch_size=size))
    with torch.no_grad():
        expected = torch.cat([model.eval()(part.to(DEVICE)).cpu() for part in inputs.split(size)])
    assert outputs.device.type == "cpu" and torch.equal(outputs, expected)


def test_a_resume_restores_dropout_bit_for_bit():
    straight, going_on, kept = resumed(lambda: Net(dropout=0.3))
    assert distance(straight, going_on) == 0.0
    names = {"torch", *(() if REHEARSAL else ("cuda",))}
    assert names <= saved(str(kept / "rng" / "rank-0.safetensors")).keys()


def test_dropout_draws_from_the_generator_of_the_gpu(gpu):
    gpu("a generator of CUDA")
    _, going_on, kept = resumed(lambda: Net(dropout=0.3))
    model = Net(dropout=0.3)
    torch.cuda.manual_seed(99)
    before = torch.cuda.get_rng_state()
    trainer(model, max_steps=20, epochs=9, resume_from_checkpoint=str(kept)).fit(loader())
    assert distance(weights(model), going_on) == 0.0  # whatever the process drew before
    assert torch.equal(torch.cuda.get_rng_state(), before)  # training left the generator of the process unchanged


def test_bf16_computes_in_bf16_and_keeps_weights_in_float32():
    seen = set()

    def loss_fn(outputs, targets):
        seen.add(outputs.dtype)
        return nn.functional.cross_entropy(outputs.float(), targets)

    model = Net()
    history = trainer(model, epochs=3, mixed_precision="bf16", loss_fn=loss_fn).fit(loader())
    assert seen == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {torch.float32}
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]


class Scales(Callback):
    """Record which updates were skipped."""

    def __init__(self):
        self.left_out = []

    def on_step_end(self, state, result):
        if result.skipped:
            self.left_out.append(state.step)


def test_an_overflow_of_fp16_is_left_out_and_a_resume_is_exact():
    # The first scale is too large for fp16, and it doubles every four updates: overflows come before and after the stop.
    settings = {"mixed_precision": "fp16", "scaler_init_scale": 2.0**24, "scaler_growth_interval": 4}
    scales = Scales()
    straight, going_on, kept = resumed(lambda: Net(dropout=0.1), until=40, callbacks=[scales], **settings)
    assert distance(straight, going_on) == 0.0
    assert all(torch.isfinite(value).all() for value in straight.values())
    halves = len(scales.left_out) // 2  # the first half is of the run without a stop, the second of the two parts
    assert scales.left_out[:halves] == scales.left_out[halves:]
    assert scales.left_out[0] == 1 and any(step > 11 for step in scales.left_out)
    content = json.loads((kept / "state.json").read_text())
    assert "scale" in json.dumps(content)


def test_compiled_training_gives_the_same_loss():
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("torch.compile needs a C compiler")
    losses = {}
    for is_compiled in (False, True):
        history = trainer(Net(), epochs=2, compile=is_compiled, log_every_n_steps=1).fit(loader())
        losses[is_compiled] = history.rows[-1]["loss"]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)


def test_recomputed_activations_change_no_bit():
    trained = []
    for is_on in (False, True):
        model = Net(dropout=0.2)
        trainer(model, epochs=1, activation_checkpointing=is_on).fit(loader())
        trained.append(weights(model))
    assert distance(*trained) == 0.0


def test_recomputed_activations_need_less_memory(gpu):
    gpu("CUDA's allocator, which counts its peak")
    peaks = {}
    for is_on in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = Net(width=1024, depth=12)  # recomputing keeps the inputs of 12 blocks, and all of one block
        settings = {"max_steps": 2, "batch_size": 32768, "activation_checkpointing": is_on}
        trainer(model, **settings).fit(data(3 * 32768))
        peaks[is_on] = torch.cuda.max_memory_allocated()
        del model
    assert peaks[True] < 0.75 * peaks[False], peaks


def test_averaged_weights_are_those_of_a_cpu():
    models = {}
    for device in dict.fromkeys((DEVICE, "cpu")):
        models[device] = Net(has_norm=True)
        ema = ExponentialMovingAverage(0.9)
        ours = trainer(models[device], epochs=2, dtype="float64", device=device, callbacks=[ema])
        assert ours.fit(loader(), data(96)).steps == ema.num_averaged == 24
    assert distance(weights(models[DEVICE]), weights(models["cpu"])) < 1e-9


def test_the_use_of_the_gpu_and_its_share_of_the_peak_are_logged(gpu):
    gpu("the counters of a GPU")
    callbacks = [DeviceStats(), ThroughputAndMFU(peak_flops=1e15)]
    settings = {"epochs": 2, "mixed_precision": "bf16", "log_every_n_steps": 4, "callbacks": callbacks}
    history = trainer(Net(width=512), **settings).fit(loader())
    rows = [json.loads(line) for line in Path(history.run_dir, "metrics.jsonl").read_text().splitlines()]
    lines = [row for row in rows if row["split"] == "train"]
    assert len(lines) > 2
    for line in lines[1:]:
        assert line["flops_per_second"] > 0 and line["mfu"] == pytest.approx(line["flops_per_second"] / 1e15)
    assert any("gpu/memory_gib_0" in line for line in lines)
    assert all(
        0 < line.get("gpu/memory_gib_0", 1) < 1000 and 0 <= line.get("gpu/utilization_0", 0) <= 100 for line in lines
    )


def test_several_models_get_the_weights_of_a_cpu():
    def step(models, batch, update):
        hidden = models["first"](batch[0])
        update("first", nn.functional.cross_entropy(hidden, batch[1]))
        update("second", nn.functional.mse_loss(models["second"](batch[0]), hidden.detach()))

    trained = {}
    for device in dict.fromkeys((DEVICE, "cpu")):
        ours = trainer(
            None, models={"first": Net(), "second": Net(width=32)}, optimizer=None, training_step=step, epochs=2,
            dtype="float64", device=device, global_batch_size=48, gradient_accumulation_steps=2, gradient_clipping=0.5,
        )  # fmt: skip
        ours.fit(data())
        trained[device] = [weights(ours.model[name]) for name in ("first", "second")]
    for own, of_cpu in zip(trained[DEVICE], trained["cpu"], strict=True):
        assert distance(own, of_cpu) < 1e-9


def test_a_loop_of_the_script_resumes_bit_for_bit():
    def train(**settings):
        with distributed.Session(device=DEVICE, nproc_per_node=1, verbose=False, epochs=9, **settings) as session:
            model = Net(dropout=0.3)
            model, _, batches = session.prepare(model, sgd(model.parameters()), loader())
            session.resume()
            for _ in session.epochs():
                for inputs, targets in batches:
                    assert inputs.device.type == DEVICE
                    session.backward(nn.functional.cross_entropy(model(inputs), targets))
                    session.update()
            return weights(model), session.run_dir

    straight, _ = train(max_steps=20)
    _, run = train(max_steps=11)
    kept = max(run.glob("checkpoints/step-*"))
    going_on, _ = train(max_steps=20, resume_from_checkpoint=str(kept))
    assert distance(straight, going_on) == 0.0


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_language_model_of_transformers_learns_and_resumes_bit_for_bit(precision):
    transformers = pytest.importorskip("transformers")
    size = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 96, "n_positions": 32}

    def model():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))

    tokens = torch.randint(0, 96, (256, 1), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in (tokens + torch.arange(32)) % 96]  # counts up from any token
    settings = {"epochs": 3, "optimizer": None, "learning_rate": 3e-3, "batch_size": 16, "mixed_precision": precision}
    straight = model()
    history = trainer(straight, **settings).fit(rows)
    assert history.rows[-1]["loss"] < 0.5 * history.rows[0]["loss"]
    kept = checkpoint(trainer(model(), **settings, max_steps=21).fit(rows))
    going_on = model()
    trainer(going_on, **settings, resume_from_checkpoint=str(kept)).fit(rows)
    assert distance(weights(straight), weights(going_on)) == 0.0


def test_too_little_memory_names_the_rank_and_training_goes_on_afterwards():
    from distributed.errors import TrainingError

    calls = []

    def step(model, batch):
        calls.append(1)
        if len(calls) == 3:
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=DEVICE)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(TrainingError, match=r"^rank 0 is out of memory in step 3: .*lower batch_size=32") as caught:
        trainer(Net(), training_step=step).fit(loader())
    assert isinstance(caught.value.__cause__, RuntimeError if REHEARSAL else torch.OutOfMemoryError)
    assert trainer(Net(), epochs=1).fit(loader()).steps == 12


def test_a_nan_is_named_at_its_own_step():
    from distributed.errors import TrainingError

    inputs, targets = data().tensors
    inputs[5 * 32 + 3] = float("nan")
    spoilt = torch.utils.data.TensorDataset(inputs, targets)
    with pytest.raises(
        TrainingError, match=r"^step 6: the loss is nan on rank 0 for samples .* \(samples at positions 160 to 191"
    ):
        trainer(Net(), shuffle=False, batch_size=32, checkpoint_every_n_steps=5).fit(spoilt)
    assert [path.name for path in Path().rglob("checkpoints/step-*")] == ["step-00000005"]


def test_a_context_is_entered_and_left_at_its_steps():
    class Context:
        said = ""

        def __enter__(self):
            self.said += "in "

        def __exit__(self, *failure):
            self.said += "out"

    context = Context()
    trainer(Net(), epochs=1, callbacks=[During(context, 2, 4)]).fit(loader())
    assert context.said == "in out"  # the tests of waiting depend on this
