"""Checkpoints between devices, in the background, and in memory."""

from __future__ import annotations

import torch
from gpu_support import (
    DEVICE,
    Net,
    checkpoint,
    data,
    distance,
    loader,
    resumed,
    run_job,
    saved,
    trainer,
    weights,
)

DOUBLE = {"dtype": "float64", "epochs": 9}


def test_a_run_goes_on_where_another_device_has_stopped():
    straight = Net(has_norm=True)
    trainer(straight, max_steps=20, **DOUBLE, device="cpu").fit(loader())
    for first, second in ((DEVICE, "cpu"), ("cpu", DEVICE)):
        halted = trainer(Net(has_norm=True), max_steps=11, **DOUBLE, device=first).fit(loader())
        model = Net(has_norm=True)
        again = trainer(model, max_steps=20, **DOUBLE, device=second, resume_from_checkpoint=str(checkpoint(halted)))
        assert again.fit(loader()).steps == 20
        assert distance(weights(model), weights(straight)) < 1e-9


def test_a_save_in_the_background_holds_the_weights_of_its_step(gpu):
    settings = {"checkpoint_every_n_steps": 2, "keep_latest_k": 99, "optimizer": None}
    straight, going_on, kept = resumed(lambda: Net(dropout=0.3, width=512), checkpoint_async=True, **settings)
    assert distance(straight, going_on) == 0.0
    again, _, other = resumed(lambda: Net(dropout=0.3, width=512), **settings)
    assert distance(straight, again) == 0.0
    in_background, at_once = kept.parent, other.parent
    files = {path.relative_to(in_background) for path in in_background.rglob("*.safetensors")}
    assert files == {path.relative_to(at_once) for path in at_once.rglob("*.safetensors")}
    assert len({name.parts[0] for name in files}) > 5  # while the first of them were written, training went on
    for name in files:
        assert distance(saved(str(in_background / name)), saved(str(at_once / name))) == 0.0
    gpu("pinned memory")
    from distributed.backends._torch.copying import TorchCopying

    ours = trainer(Net(), epochs=1)
    ours.fit(loader())
    assert torch.frombuffer(TorchCopying(ours.backend).allocate(64), dtype=torch.uint8).is_pinned()


def test_a_killed_process_goes_on_bit_for_bit(monkeypatch, tmp_path):
    trained = {}
    for name, flags, resumed_from in (
        ("straight", [], ""),
        ("from a checkpoint", ["--checkpoint-every-n-steps", "5"], ": step 15, epoch 2"),
        ("from a snapshot", ["--set", "snapshot_every_n_steps=1"], " in memory: step 16, epoch 2"),
    ):
        where = tmp_path / name
        where.mkdir()
        monkeypatch.chdir(where)
        monkeypatch.setenv("KILLED", "" if name == "straight" else "killed")
        code, output = run_job("killed.py", "--backend", "pytorch-ddp", "--max-restarts", "1", *flags)
        assert code == 0, output
        assert ("was killed by signal 9 (SIGKILL): restarting" in output) is (name != "straight"), output
        assert resumed_from in output, output
        trained[name] = saved("weights.safetensors")
    for name in ("from a checkpoint", "from a snapshot"):
        assert distance(trained["straight"], trained[name]) == 0.0


def test_predictions_in_files_are_those_in_memory(tmp_path):
    import distributed

    ours = trainer(Net(), epochs=1)
    ours.fit(loader())
    inputs = data().tensors[0]
    ours.predict(inputs, out=tmp_path / "predictions")
    assert torch.equal(torch.as_tensor(distributed.load_predictions(tmp_path / "predictions")), ours.predict(inputs))
