"""A loop of the script in this very process: the numbers of Trainer, what is logged and saved, and every misuse refused."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import distributed
from distributed.backends._torch.non_finite_loss import shown_in_gradients
from distributed.errors import ConfigError, TrainingError, TrainingInterrupted
from distributed.training.files import _Taken

INPUTS = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())
SETTINGS = {"epochs": 2, "batch_size": 4, "shuffle": True, "seed": 3, "verbose": False}


@pytest.fixture(autouse=True)
def own_place(monkeypatch, tmp_path):
    """A process that has trained nothing yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Taken, "first", None)
    monkeypatch.setattr(_Taken, "count", 0)
    monkeypatch.setattr(_Taken, "num_named", Counter())
    monkeypatch.setattr(sys, "argv", ["train.py"])


def make():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)
    )


def adam(params):
    return torch.optim.Adam(params, lr=0.02)


def mean_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def summed_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def own(loss_of=mean_loss, model=None, optimizer=adam, data=DATA, schedule=None, steps=None, **settings):
    """Train in a loop, and return (model, run directory)."""
    model = model or make()
    with distributed.Session(**{**SETTINGS, **settings}) as s:
        called, _, loader = s.prepare(model, optimizer, data, scheduler=schedule)
        s.resume()
        for _ in s.epochs():
            for batch in loader:
                s.backward(loss_of(called, batch))
                s.update()
                if steps == s.step:
                    s.stop("enough")
        run_dir = s.run_dir
    return model, run_dir


def run_with(step, **settings):
    """Train with `step(session, model, batch)` for each batch."""
    with distributed.Session(**{**SETTINGS, **settings}) as s:
        called, s.optimizer, loader = s.prepare(make(), adam, DATA)
        for _ in s.epochs():
            for batch in loader if step is not None else ():
                step(s, called, batch)


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("settings", "loss_of"),
    [
        ({}, mean_loss),
        ({}, summed_loss),
        ({"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}, mean_loss),
        ({"mixed_precision": "bf16", "warmup_steps": 3}, mean_loss),
        ({"mixed_precision": "fp16", "gradient_accumulation_steps": 3}, mean_loss),
        ({"scheduler": "cosine", "dtype": "float64"}, mean_loss),
    ],
    ids=["plain", "sum-and-count", "accumulated-clipped", "bf16-warm-up", "fp16", "cosine-float64"],
)
def test_the_weights_are_those_of_trainer_bit_for_bit(settings, loss_of):
    model, _ = own(loss_of, **settings)
    trainer = distributed.Trainer(make(), optimizer=adam, training_step=loss_of, **{**SETTINGS, **settings})
    trainer.fit(DATA)
    assert same(model, trainer.model) and not same(model, make().to(next(model.parameters()).dtype))


def test_a_stopped_run_goes_on_bit_for_bit_in_the_middle_of_an_epoch():
    whole, _ = own()
    _, stopped = own(steps=2)
    assert json.loads((stopped / "result.json").read_text())["stop_reason"] == "enough"
    with distributed.Session(**SETTINGS, resume_from_checkpoint=str(stopped)) as s:
        resumed = make()
        called, _, loader = s.prepare(resumed, adam, DATA)
        position = s.resume()
        assert (position.step, position.epoch, position.samples_in_epoch) == (2, 0, 8)
        seen = []
        for epoch in s.epochs():
            for inputs, targets in loader:
                seen.append(epoch)
                s.backward(F.cross_entropy(called(inputs), targets))
                s.update()
    assert seen == [0] * 4 + [1] * 6 and same(whole, resumed)


def test_a_trainer_goes_on_from_a_checkpoint_with_its_own_form_of_the_loss():
    is_label = torch.tensor([0, 1, 1, 1, 0, 0, 0, 1] * 3)[:22] > 0  # micro-batches with different numbers of labels
    data = TensorDataset(INPUTS, torch.where(is_label, DATA.tensors[1], -100))
    settings = {**SETTINGS, "gradient_accumulation_steps": 2, "shuffle": False}

    def counted(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] != -100).sum()

    def trained(**more):
        trainer = distributed.Trainer(make(), optimizer=adam, loss_fn=F.cross_entropy, **{**settings, **more})
        return trainer, trainer.fit(data)

    _, own_run = own(counted, data=data, **{**settings, "epochs": 1})
    whole, _ = trained()
    resumed, history = trained(resume_from_checkpoint=str(own_run))
    assert len(history.rows) == 2
    for expected, found in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_state_of_the_script_travels_with_checkpoints():
    with distributed.Session(**SETTINGS) as s:
        called, _, loader = s.prepare(make(), adam, DATA)
        for _ in s.epochs():
            for batch in loader:
                s.backward(mean_loss(called, batch))
                s.update()
            s.state["best"] = s.step
        s.save("kept")
    with distributed.Session(**SETTINGS, resume_from_checkpoint="kept") as s:
        s.prepare(make(), adam, DATA)
        s.resume()
        assert s.state == {"best": 12}


def test_files_of_the_run_are_those_of_a_trainer():
    other = DataLoader(DATA, batch_size=5)
    with distributed.Session(**SETTINGS, log_every_n_steps=3, monitor="val_hits", monitor_mode="max") as s:
        model = make()
        called, _, loader, val_loader = s.prepare(model, adam, DATA, other)
        assert (len(loader), len(val_loader)) == (6, 5)
        for epoch in s.epochs():
            called.train()
            for batch in loader:
                loss = mean_loss(called, batch)
                s.backward(loss)
                s.update()
                s.log("loss", 2 * loss)
                s.log("size", len(batch[1]))
            called.eval()
            targets = []
            for batch in val_loader:
                with torch.no_grad():
                    s.log("val_loss", mean_loss(called, batch))
                targets.append(s.gather(batch[1]))
            assert torch.equal(torch.cat(targets), DATA.tensors[1])
            s.log("val_hits", 10 - epoch)
        expected = float(F.cross_entropy(called(INPUTS), DATA.tensors[1]).detach())
        run_dir = s.run_dir
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["steps"], result["best_metrics"]["val_hits"]) == ("finished", 12, 10)
    assert abs(result["final_metrics"]["val_loss"] - expected) < 1e-6
    assert result["final_metrics"]["size"] == pytest.approx((5 * 16 + 4) / 22)  # weighs each batch by its samples
    lines = lines_of(run_dir)
    assert [(line["step"], line["split"]) for line in lines] == [
        (3, "train"), (6, "train"), (6, "val"), (9, "train"), (12, "train"), (12, "val"),
    ]  # fmt: skip
    trainer = distributed.Trainer(make(), optimizer=adam, loss_fn=F.cross_entropy, **SETTINGS, log_every_n_steps=3)
    trained = [line["loss"] for line in lines_of(Path(trainer.fit(DATA).run_dir)) if line["split"] == "train"]
    ours = [line["loss"] for line in lines if line["split"] == "train"]
    assert ours == pytest.approx([2 * loss for loss in trained], abs=1e-9)
    assert (run_dir / "config.yaml").exists() and (run_dir / "report.html").exists()
    loaded = make()
    distributed.load_weights(loaded, run_dir / result["checkpoint"])
    assert same(loaded, model)


def validated(hook=lambda s: None, after=lambda s: False, **settings):
    """Train and log `val_loss` as 1 after each epoch. Return (the epochs, the number of updates in each, result, lines).

    `hook` is called after each update. A loop over the epochs ends if `after` returns True.
    """
    epochs, counts = [], []
    with distributed.Session(**{**SETTINGS, "epochs": 3, **settings}) as s:
        called, _, loader = s.prepare(make(), adam, DATA)
        s.resume()
        for epoch in s.epochs():
            epochs.append(epoch)
            counts.append(0)
            for batch in loader:
                s.backward(mean_loss(called, batch))
                s.update()
                counts[-1] += 1
                if hook(s):
                    break
            s.log("val_loss", 1.0)
            if after(s):
                break
        run_dir = s.run_dir
    return epochs, counts, json.loads((run_dir / "result.json").read_text()), lines_of(run_dir)


@pytest.mark.parametrize(
    ("arguments", "counts", "num_finished", "reason"),
    [
        ({"max_steps": 2}, [2], 0, "max_steps"),
        ({"hook": lambda s: s.step == 2 and s.stop("enough")}, [2], 0, "enough"),
        ({"after": lambda s: s.step == 12}, [6, 6], 2, "break"),
        ({"hook": lambda s: s.step == 2, "after": lambda s: True}, [2], 0, "break"),
        ({"max_steps": 6}, [6], 1, "max_steps"),
    ],
    ids=["max-steps", "stop", "break-after-an-epoch", "break-in-an-epoch", "max-steps-at-the-end-of-an-epoch"],
)
def test_the_last_validation_counts_however_the_loop_ends(arguments, counts, num_finished, reason):
    epochs, found, result, lines = validated(**arguments)
    assert (epochs, found) == (list(range(len(counts))), counts)
    assert (result["steps"], result["epochs"], result["stop_reason"]) == (sum(counts), num_finished, reason)
    assert result["final_metrics"]["val_loss"] == 1 and "loss" in result["final_metrics"]
    assert (lines[-1]["step"], lines[-1]["split"], lines[-1]["loss"]) == (sum(counts), "val", 1)


def test_an_evaluation_within_a_batch_leaves_the_batch_as_it_was():
    seen = []
    with distributed.Session(**{**SETTINGS, "epochs": 1, "mixed_precision": "bf16"}) as s:
        called, _, loader, held_out = s.prepare(make(), adam, DATA, DataLoader(DATA, batch_size=16))
        for _ in s.epochs():
            for batch in loader:
                for number, _ in enumerate(held_out):
                    s.log("test_number", number)
                seen.append(torch.is_autocast_enabled("cpu"))
                s.backward(mean_loss(called, batch))
                for _ in held_out:
                    seen.append(torch.is_autocast_enabled("cpu"))
                seen.append(torch.is_autocast_enabled("cpu"))
                s.log("number", len(batch[1]))
                s.update()
        run_dir = s.run_dir
    (row,) = [line for line in lines_of(run_dir) if line["split"] == "train"]
    assert row["test_number"] == pytest.approx(6 / 22)  # each batch weighs its samples, those of training too
    assert row["number"] == pytest.approx((5 * 16 + 4) / 22)
    assert seen == [True, True, True, False] * 6


def test_the_newest_validation_of_an_epoch_counts_and_one_after_the_last_epoch_too():
    logged = {3: [8, 4], 4: [2, 6], 6: [5]}  # step -> values
    with distributed.Session(**SETTINGS, monitor_mode="min") as s:
        called, _, loader = s.prepare(make(), adam, DATA)
        assert s.step == 0
        s.resume()
        s.log("num_parameters", 66)
        for epoch in s.epochs():
            for batch in loader:
                s.backward(mean_loss(called, batch))
                s.update()
                for value in logged.get(s.step, ()) if epoch == 0 else ():
                    s.log("val_twice", value)
                    if s.step < 6:
                        s.log("val_once", value)
            s.log("val_loss", 3 - epoch)
        s.log("val_final", 7)
        run_dir = s.run_dir
    rows = json.loads((run_dir / "result.json").read_text())
    lines = lines_of(run_dir)
    first, second, last = (line for line in lines if line["split"] == "val")
    assert (first["twice"], first["once"], first["loss"]) == (5, 4, 3)
    assert (second["loss"], last["final"], last["step"]) == (2, 7, 12)
    assert (rows["final_metrics"]["val_loss"], rows["final_metrics"]["val_final"], rows["epochs"]) == (2, 7, 2)
    assert lines[0]["num_parameters"] == 66
    with distributed.Session(**{**SETTINGS, "epochs": 3}, resume_from_checkpoint=str(run_dir)) as s:
        called, _, loader = s.prepare(make(), adam, DATA)
        assert s.step == 0 and s.resume().step == s.step == 12


def test_a_second_loop_in_an_epoch_first_does_what_was_due_in_the_first_one():
    each = {"log_every_n_steps": 1, "checkpoint_every_n_steps": 1, "keep_latest_k": 9, "epochs": 1}
    with distributed.Session(**{**SETTINGS, **each}) as s:
        called, _, loader = s.prepare(make(), adam, torch.utils.data.Subset(DATA, range(22)))
        assert (len(loader.dataset), loader.batch_size) == (22, 4)
        for _ in s.epochs():
            for limit in (2, 6):
                for batch in loader:
                    s.backward(mean_loss(called, batch))
                    s.update()
                    if s.step == limit:
                        break
        run_dir = s.run_dir
    assert [line["step"] for line in lines_of(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 6


def signalled(place, seen):
    """Get a signal in `place`, and note in `seen` what is done after it. Return the run directory."""
    with contextlib.suppress(TrainingInterrupted), distributed.Session(**SETTINGS) as s:
        model, _, loader, held_out = s.prepare(make(), adam, DATA, DATA)
        for _ in s.epochs():
            for batch in loader:
                s.backward(mean_loss(model, batch))
                s.update()
                if place == "training" and s.step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
            seen.append("trained")
            for _ in held_out:
                if place == "evaluation":
                    os.kill(os.getpid(), signal.SIGTERM)
            seen.append("evaluated")
        seen.append("ended")
    return s.run_dir


def counted_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum"), (targets >= 0).sum()


def test_a_loss_that_is_nan_without_a_gradient_ends_the_run():
    """Cross-entropy without a label that counts is 0 / 0, and its gradient is zero. Its sum is 0, which counts nothing."""
    ignored = DATA.tensors[1].clone()
    ignored[4:8] = -100
    data, settings = TensorDataset(INPUTS, ignored), {"shuffle": False, "gradient_accumulation_steps": 2}
    said = r"step 1: the loss is nan on rank 0 for samples .* \(samples at positions 0 to 7"
    with pytest.raises(TrainingError, match=said):
        own(data=data, **settings)
    with pytest.raises(TrainingError, match=said):
        distributed.Trainer(make(), training_step=mean_loss, **{**SETTINGS, **settings}).fit(data)
    model, _ = own(counted_loss, data=data, **settings)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_loss_that_is_not_finite_shows_in_the_gradients_without_a_read():
    model = make()
    inputs, none = INPUTS[:4], torch.full((4,), -100)
    for number, spoiled in ((1, 1), (None, 6)):
        for targets, expected in ((none, spoiled), (DATA.tensors[1][:4], 0)):
            model.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            with shown_in_gradients(loss, 1.0 + 0.0 * loss.detach(), number):
                loss.backward()
            assert sum(bool(each.grad.isnan().any()) for each in model.parameters()) == expected
            model.zero_grad()  # the hooks are gone
            F.cross_entropy(model(inputs), none).backward()
            assert all(each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize(("place", "step", "done"), [("training", 2, []), ("evaluation", 6, ["trained"])])
def test_a_signal_saves_and_leaves_the_block_at_once(place, step, done):
    seen = []
    run = signalled(place, seen)

    assert seen == done
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert json.loads((run / "result.json").read_text())["status"] == "interrupted"


def test_early_stopping_watches_what_the_loop_logs():
    seen = []
    with distributed.Session(**{**SETTINGS, "epochs": 9}, early_stopping_patience=2) as s:
        called, _, loader = s.prepare(make(), adam, DATA)
        for epoch in s.epochs():
            seen.append(epoch)
            for batch in loader:
                s.backward(mean_loss(called, batch))
                s.update()
            s.log("val_loss", epoch)
    assert seen == [0, 1, 2]


def test_the_model_is_the_users_in_every_respect_but_its_calls():
    with distributed.Session(**SETTINGS) as s:
        model = make()
        called, optimizer, _ = s.prepare(model, adam, DATA)
        assert isinstance(called, torch.nn.Sequential) and isinstance(optimizer, torch.optim.Adam)
        assert list(called.parameters()) == list(model.parameters())
        called.eval()
        assert not model.training and torch.equal(called(INPUTS), model(INPUTS))
        assert type(copy.deepcopy(called)) is torch.nn.Sequential
        torch.save(called, io.BytesIO())


def test_the_block_is_seeded_and_leaves_the_callers_generators_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        with distributed.Session(seed=5, verbose=False):
            drawn.append(torch.rand(3))
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(*drawn) and not torch.equal(drawn[0], expected)


def fails(s, called, batch):
    s.backward(mean_loss(called, batch))
    s.update()
    raise ZeroDivisionError(str(s.run_dir))


def fails_in_forward(s, called, batch):
    raise ZeroDivisionError(str(s.run_dir))


@pytest.mark.parametrize(("step", "steps"), [(fails, 1), (fails_in_forward, 0)])
def test_an_error_in_the_loop_is_recorded(step, steps):
    with pytest.raises(ZeroDivisionError) as raised:
        run_with(step, mixed_precision="bf16")
    result = json.loads(Path(str(raised.value), "result.json").read_text())
    assert result["status"] == "failed" and result["steps"] == steps
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"nproc_per_node": 2},
            "run 'python -m distributed.cli train --script train.py --backend pytorch-ddp --nproc-per-node 2'",
        ),
        ({"backend": "ray"}, "this process is not one"),
        ({"backend": "tensorflow"}, "use Trainer, or a torch backend"),
    ],
)
def test_a_session_elsewhere_is_refused(settings, text):
    if importlib.util.find_spec(settings.get("backend", "torch")) is None:
        pytest.skip("the library of this backend is not installed")
    with pytest.raises(ConfigError, match=text):
        distributed.Session(**settings)


@pytest.mark.parametrize("name", ["validate_every_n_steps", "max_validation_batches"])
def test_settings_about_validation_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=3 has no effect"):
        run_with(None, **{name: 3})


def no_backward(s, called, batch):
    s.update()


def no_update(s, called, batch):
    s.backward(mean_loss(called, batch))


def nothing(s, called, batch):
    pass


def backward_twice(s, called, batch):
    loss = mean_loss(called, batch)
    s.backward(loss)
    s.backward(loss)


def update_twice(s, called, batch):
    no_update(s, called, batch)
    s.update()
    s.update()


def own_step(s, called, batch):
    no_update(s, called, batch)
    s.optimizer.step()


def own_zero_grad(s, called, batch):
    s.optimizer.zero_grad()


def detached(s, called, batch):
    s.backward(mean_loss(called, batch).detach())


def saved_too_early(s, called, batch):
    no_update(s, called, batch)
    s.save()


def taken_name(s, called, batch):
    s.log("grad_norm", 1)


def image_of_validation(s, called, batch):
    s.log("val_image", distributed.loggers.Image(torch.rand(3, 3)))


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (no_backward, r"update\(\) comes after backward"), (no_update, r"no update\(\) was called"),
        (nothing, r"no backward\(loss\) was called"), (backward_twice, "called twice for one batch"),
        (update_twice, r"update\(\) comes after backward"), (own_step, r"optimizer.step\(\) is part of update"),
        (own_zero_grad, r"optimizer.zero_grad\(\) is part of update"), (detached, "the loss has no gradient"),
        (saved_too_early, r"save\(\) was called within an update"), (taken_name, "cannot be called 'grad_norm'"),
        (image_of_validation, "is no metric: drop 'val_' from its name"),
    ],
)  # fmt: skip
def test_misuse_of_a_step_is_refused(step, text):
    with pytest.raises(ConfigError, match=text):
        run_with(step)


def test_misuse_outside_of_a_step_is_refused():
    s = distributed.Session(**SETTINGS)
    with pytest.raises(ConfigError, match="in its block only"):
        s.prepare(make(), adam, DATA)
    with s:
        with pytest.raises(ConfigError, match="nothing is prepared"):
            s.resume()
        with pytest.raises(ConfigError, match="got no data"):
            s.prepare(make(), adam)
        with pytest.raises(ConfigError, match="several models"):
            s.prepare({"g": make()}, adam, DATA)
        with pytest.raises(ConfigError, match="got a str as its scheduler: pass"):
            s.prepare(make(), adam, DATA, scheduler="cosine")
        _, _, loader = s.prepare(make(), adam, DATA)
        with pytest.raises(ConfigError, match=r"prepare\(\) was called twice"):
            s.prepare(make(), adam, DATA)
        with pytest.raises(ConfigError, match=r"put its loop into 'for epoch in s.epochs"):
            next(iter(loader))
        for name in ("size", "val_loss"):
            with pytest.raises(ConfigError, match=r"call it after s.resume\(\), or in"):
                s.log(name, 1)
        s.save("early")
        with pytest.raises(ConfigError, match=r"resume\(\) was called too late"):
            s.resume()
        with pytest.raises(ConfigError, match=r"backward\(loss\) belongs in the loop"):
            s.backward(torch.ones((), requires_grad=True))


def test_a_checkpoint_that_the_script_does_not_load_is_an_error():
    _, stopped = own(steps=2)
    with pytest.raises(ConfigError, match=r"call s.resume\(\) after"):
        run_with(no_update, resume_from_checkpoint=str(stopped))


def test_an_epoch_without_an_update_is_an_error():
    with pytest.raises(ConfigError, match="an epoch made no update"):
        run_with(None)


def test_early_stopping_without_a_metric_is_an_error():
    with pytest.raises(ConfigError, match=r"call s.log\('val_loss', value\)"):
        own(early_stopping_patience=2)


def test_launch_needs_a_function():
    with pytest.raises(ConfigError, match="needs a function"):
        distributed.launch("train.py", nproc_per_node=2)
