"""`distributed checkpoint convert`: what other programs save becomes a safetensors file, and no code runs without --trust."""

from __future__ import annotations

import collections
import json
import os
import pickle
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import distributed
from distributed import Trainer
from distributed.backends import converting
from distributed.backends._torch import foreign
from distributed.backends.converting import convert, recognize
from distributed.cli.__main__ import main
from distributed.errors import CheckpointError, ConfigError
from tests.conftest import Finished, needs_backend


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


WEIGHTS = net().state_dict()


def code_of(*argv: object) -> int:
    """Run the command line in this process, and return its exit code."""
    with pytest.raises(SystemExit) as left:
        main([*map(str, argv)])
    return int(left.value.code or 0)


def check(file: Path, expected: dict[str, torch.Tensor] = WEIGHTS) -> None:
    """Assert that the file has these tensors bit for bit, and that they load into the model."""
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in expected
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    assert distributed.load_weights(model, file).fits


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `convert` read here what its child would read: importing torch there takes two seconds."""

    def answer(order: dict[str, Any]) -> tuple[bytes, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child's stderr is not shown either
            return json.dumps({**foreign.read(order), "is_isolated": False}).encode(), ""

    monkeypatch.setattr(converting, "_run_child", answer)


class Runs:
    """An object that runs code when it is unpickled: it says whether the network can be reached."""

    def __init__(self, file: Path, port: int) -> None:
        self.file, self.port = str(file), port

    def __reduce__(self) -> Any:
        reach = f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {self.port}), 2); found = 'network'\n"
        code = f"{reach}except OSError: found = 'no network'\nopen({self.file!r}, 'w').write(found)"
        return exec, (code,)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        {"state_dict": WEIGHTS, "epoch": 3, "hyper_parameters": {"rate": 0.1}},  # Lightning
        {"model_state_dict": WEIGHTS, "optimizer_state_dict": {"state": {}}},
        {"app": {"model": WEIGHTS, "optim": {"state": {0: {"step": torch.ones(1)}}}}},
        {f"module.{name}": value for name, value in WEIGHTS.items()},  # DDP
        {f"_orig_mod.{name}": value for name, value in WEIGHTS.items()},  # torch.compile
        {**WEIGHTS, "0._extra_state": [1, 2]},
    ],
    ids=["plain", "lightning", "tutorial", "nested", "ddp", "compiled", "extra"],
)
def test_a_file_of_torch_save(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "model.pt")
    done = convert(tmp_path / "model.pt", tmp_path / "out.safetensors")
    assert done.format == "torch" and done.skipped == (("0._extra_state",) if "0._extra_state" in content else ())
    check(tmp_path / "out.safetensors")


@pytest.mark.usefixtures("in_this_process")
def test_names_keys_and_prefixes(tmp_path: Path) -> None:
    renamed = {f"model.{name}": value for name, value in WEIGHTS.items()}
    torch.save({"stages": {"last": {**renamed, "loss.weight": torch.ones(2)}}}, file := tmp_path / "model.ckpt")
    with pytest.raises(CheckpointError, match=r"no weights were found: it has stages; say where they are with --key"):
        convert(file, tmp_path / "out.safetensors")
    with pytest.raises(CheckpointError, match=r"there is no stages.first: stages has last"):
        convert(file, tmp_path / "out.safetensors", key="stages.first")
    with pytest.raises(CheckpointError, match=r"no name begins with 'net\.': it has model\.0\.weight"):
        convert(file, tmp_path / "out.safetensors", key="stages.last", prefix="net.")
    convert(file, tmp_path / "out.safetensors", key="stages.last", prefix="model.")
    check(tmp_path / "out.safetensors")
    with pytest.raises(ConfigError, match="exists: add --force"):
        convert(file, tmp_path / "out.safetensors", key="stages.last")
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".tmp")] == []


def test_a_pickle_runs_code_only_when_it_is_trusted_and_then_without_network(
    tmp_path: Path, run_cli: Callable[..., Finished]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        evil = {"state_dict": WEIGHTS, "callbacks": Runs(tmp_path / "ran", listener.getsockname()[1])}
        torch.save(evil, tmp_path / "model.ckpt")
        command = ["checkpoint", "convert", str(tmp_path / "model.ckpt"), str(tmp_path / "out.safetensors")]
        refused = run_cli(command)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.output
        assert "needs exec: reading it can run code. If you trust where it comes from, add --trust." in refused.stderr
        assert not (tmp_path / "ran").exists() and not (tmp_path / "out.safetensors").exists()

        done = run_cli([*command, "--trust"])
        assert done.returncode == 0, done.output
        check(tmp_path / "out.safetensors")
        isolated = "read by a process with network" not in done.stdout
        assert (tmp_path / "ran").read_text() == ("no network" if isolated else "network")
        if os.geteuid() == 0 and os.environ.get("REQUIRE_MACHINES"):
            assert isolated


def test_a_directory_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save({"model": dict(WEIGHTS), "epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(
        CheckpointError, match=r"is a checkpoint of DCP, which contains pickles: reading it can run code"
    ):
        convert(tmp_path / "dcp", tmp_path / "out.safetensors")
    assert convert(tmp_path / "dcp", tmp_path / "out.safetensors", trust=True).format == "DCP"
    check(tmp_path / "out.safetensors")


@pytest.mark.usefixtures("in_this_process")
def test_directories_of_accelerate_and_transformers(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(net())
    for safe in (True, False):
        accelerator.save_state(str(tmp_path / str(safe)), safe_serialization=safe)
        convert(tmp_path / str(safe), tmp_path / f"{safe}.safetensors")
        check(tmp_path / f"{safe}.safetensors", model.state_dict())

    shards = tmp_path / "shards"
    shards.mkdir()
    names = list(WEIGHTS)
    for number, part in enumerate((names[:3], names[3:])):
        torch.save({name: WEIGHTS[name] for name in part}, shards / f"pytorch_model-0000{number + 1}-of-00002.bin")
    torch.save({"args": 1}, shards / "training_args.bin")
    convert(shards, tmp_path / "shards.safetensors")
    check(tmp_path / "shards.safetensors")


@pytest.mark.usefixtures("in_this_process")
def test_a_checkpoint_that_lightning_writes(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = net()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)

    module = Module(rate=0.1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hints to srun and to loader processes
        trainer = lightning.Trainer(max_steps=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=8))
    trainer.save_checkpoint(tmp_path / "model.ckpt")

    convert(tmp_path / "model.ckpt", tmp_path / "out.safetensors", prefix="model.")
    check(tmp_path / "out.safetensors", module.model.state_dict())
    assert not torch.equal(module.model[0].weight, WEIGHTS["0.weight"])


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_directory_of_deepspeed(tmp_path: Path, run_cli: Callable[..., Finished], stage: int) -> None:
    """DeepSpeed itself saves it, on two processes, beside a checkpoint of ours."""
    needs_backend("deepspeed")
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
Trainer(model, global_batch_size=4, max_steps=2).fit(TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,))))
"""
    )
    flags = [
        "--set",
        f"deepspeed.zero_stage={stage}",
        "--set",
        "deepspeed.native_checkpoint=true",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = run_cli(
        ["train", "--script", str(script), "--backend", "deepspeed", "--nproc-per-node", "2", *flags], timeout=200
    )
    assert done.returncode == 0, done.output
    (model,) = (tmp_path / "run" / "checkpoints").glob("step-00000002")
    saved = next(model.rglob("*_model_states.pt")).parent
    with pytest.raises(CheckpointError, match="is a checkpoint of DeepSpeed, which contains pickles"):
        convert(saved, tmp_path / "out.safetensors")
    assert convert(saved, tmp_path / "out.safetensors", trust=True).format == "DeepSpeed"
    ours = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    distributed.load_weights(ours, model)
    parameters = dict(ours.named_parameters())  # DeepSpeed keeps no counters of updates for ZeRO
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], parameters[name]) for name in parameters)


def test_a_run_starts_from_a_converted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": WEIGHTS}, "model.ckpt")
    assert code_of("checkpoint", "convert", "model.ckpt", "out.safetensors") == 0
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    trainer = Trainer(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)), backend="single",
        init_from="out.safetensors", learning_rate=1e-30, max_steps=1, optimizer="sgd",
    )  # fmt: skip
    trainer.fit(data)
    assert torch.equal(trainer.model[0].weight, WEIGHTS["0.weight"])


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.pt", b"no pickle", "it is damaged, or was not written by torch.save"),
        ("model.pt", b"", "it is damaged, or was not written by torch.save"),
        ("model.pt", b"a,b\n1,2\n", "it is damaged, or was not written by torch.save"),  # and no word of --trust
        ("model.pt", pickle.dumps([1, 2]), "it is damaged, or was not written by torch.save"),
        ("model.txt", b"text", "is none of .pt, .pth"),
        ("model.safetensors", b"", "is a safetensors file already: init_from and load_weights take it as it is"),
        ("none.pt", None, "there is no "),
    ],
)
def test_what_is_no_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code = code_of("checkpoint", "convert", tmp_path / name, tmp_path / "out.safetensors")
    said = capsys.readouterr().err
    assert code == 2 and says in said and said.count("\n") == 1, said


@pytest.mark.usefixtures("in_this_process")
def test_other_objects_and_directories_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    torch.save({"a": 1, "b": "text"}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="no weights were found: it has a, b"):
        convert(tmp_path / "a.pt", tmp_path / "out.safetensors")
    torch.save([torch.ones(1)], tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="it holds no weights, but a list"):
        convert(tmp_path / "b.pt", tmp_path / "out.safetensors")
    with pytest.raises(CheckpointError, match=r"has several files of weights \(a.pt, b.pt\): name one"):
        convert(tmp_path, tmp_path / "out.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is no checkpoint that can be converted"):
        convert(tmp_path / "empty", tmp_path / "out.safetensors")
    for number in range(2):
        save_file({"w": torch.ones(1)}, tmp_path / "empty" / f"model_{number}.safetensors")
    with pytest.raises(CheckpointError, match="w is in several of its files, as of several models: name one"):
        convert(tmp_path / "empty", tmp_path / "out.safetensors")
    with pytest.raises(ConfigError, match=r"must end with \.safetensors"):
        convert(tmp_path / "a.pt", tmp_path / "out.pt")


@pytest.mark.usefixtures("in_this_process")
def test_tied_weights_and_every_element_type(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    content = {
        "a": shared,
        "b": shared,
        "t": shared.t(),
        "h": shared.half(),
        "bf": shared.bfloat16(),
        "i": shared.long(),
        "empty": torch.empty(0, 3),
    }
    torch.save(content, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in content.items())
    torch.save({"w": torch.ones(2).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(CheckpointError, match="w is a tensor of a kind that safetensors cannot hold"):
        convert(tmp_path / "sparse.pt", tmp_path / "sparse.safetensors")


def test_the_answer_of_the_child_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in a trusted pickle can write to any descriptor. The file that is left must still be a safetensors file."""

    class Lies:
        def __reduce__(self) -> Any:
            answer = json.dumps({"skipped": [], "is_isolated": True}).encode()
            code = f"import os, sys\nos.write(int(sys.argv[1]), {answer!r}); os._exit(0)"
            return exec, (code,)

    torch.save(collections.OrderedDict(a=Lies()), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="its process has written no file"):
        convert(tmp_path / "model.pt", tmp_path / "out.safetensors", trust=True)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00binary", b"x" * 4096, b"global_step1\x1b[2J", b"", b"none"])
def test_a_file_latest_that_names_no_directory_of_deepspeed_is_no_sign_of_deepspeed(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no checkpoint that can be converted"):
        recognize(tmp_path)
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("global_step1\n")
    assert recognize(tmp_path).path == tmp_path / "global_step1"
