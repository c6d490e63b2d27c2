"""Weights, optimizers, schedules and generators go through files and come back bit for bit."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

from distributed.backends._torch import generators, optimizer_state, tensor_io, tensors
from distributed.checkpoints import digests, tensor_file
from distributed.errors import CheckpointError, TrainingError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, params=[False, True], ids=["mapped", "read"])
def are_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run each test with tensors that are copied from mapped memory, and with tensors that are read from the file, as large ones are."""
    if request.param:
        monkeypatch.setattr(digests, "LARGE_BYTES", 1)
    return bool(request.param)


class Small(nn.Module):
    """Tied weights, a strided parameter, buffers of two kinds, one of them not persistent."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(6, width).t())
        self.register_buffer("scale", torch.full((), 2.0))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)) @ self.turned @ self.turned.t()) * self.scale


def small(seed: int, width: int = 4) -> Small:
    torch.manual_seed(seed)
    return Small(width)


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor_io.raw_bytes(tensor).tobytes() for name, tensor in model.state_dict().items()}


def test_weights_and_buffers_come_back_bit_for_bit_and_in_place(tmp_path: Path) -> None:
    model = small(1)
    model(torch.arange(10))  # moves the running statistics
    tensors.save_model(model, tmp_path)
    other = small(2)
    places = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    tensors.load_model(other, tmp_path)
    assert bits(other) == bits(model)
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == places
    assert other.head.weight is other.embed.weight
    assert other.turned.stride() == model.turned.stride() != model.turned.contiguous().stride()


def test_a_file_that_becomes_shorter_is_refused_and_one_that_is_replaced_is_read_to_its_end(
    tmp_path: Path, are_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = small(1), tmp_path / "model/model.safetensors"
    tensors.save_model(model, tmp_path)
    (stored,) = [tensor for tensor in tensor_file.read_raw(file)[0] if tensor.name == "turned"]
    expected, memory = bytes(stored.read()), bytearray(stored.num_bytes)
    if not are_large:
        assert stored.copy_to is None
        return
    tensors.save_model(small(2), tmp_path / "other")
    (tmp_path / "other/model/model.safetensors").replace(file)
    stored.copy_to(memoryview(memory))
    assert bytes(memory) == expected
    file.unlink()
    stored.copy_to(memoryview(memory := bytearray(stored.num_bytes)))
    assert bytes(memory) == expected

    tensors.save_model(model, tmp_path)
    other, reads = small(2), tensor_file._Source.read_into

    def shortened(source: Any, begin: int, memory: memoryview) -> None:
        os.truncate(source.path, begin + len(memory) - 1)
        reads(source, begin, memory)

    monkeypatch.setattr(tensor_file._Source, "read_into", shortened)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has become shorter while it was read"):
        tensors.load_model(other, tmp_path)


class Cleared(nn.Linear):
    """Clears its weight before it loads it, as a table that grows may do."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.weight.zero_().copy_(state[prefix + "weight"])


def doubled(module: nn.Module, state: dict[str, Any], *args: Any) -> None:
    for value in state.values():
        value.mul_(2)


@pytest.mark.parametrize("how", ["method", "hook"])
def test_a_module_of_the_script_loads_as_it_wants(tmp_path: Path, how: str) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 4, bias=False))
    tensors.save_model(plain, tmp_path)
    other = nn.Sequential(Cleared(4, 4, bias=False) if how == "method" else nn.Linear(4, 4, bias=False))
    if how == "hook":
        other.register_load_state_dict_pre_hook(doubled)
    tensors.load_model(other, tmp_path)
    assert torch.equal(other[0].weight, plain[0].weight * (2 if how == "hook" else 1))


def test_a_tied_weight_is_stored_once_and_a_buffer_that_is_not_persistent_never(tmp_path: Path) -> None:
    assert tensors.save_model(small(1), tmp_path) == {"aliases": {"head.weight": "embed.weight"}}
    stored = load_file(tmp_path / "model/model.safetensors")
    assert "embed.weight" in stored
    assert not {"head.weight", "scratch"} & set(stored)


def test_a_tied_checkpoint_opens_in_an_untied_model_but_not_the_other_way_round(tmp_path: Path) -> None:
    tensors.save_model(small(1), tmp_path)
    untied = small(2)
    untied.head.weight = nn.Parameter(torch.zeros(10, 4))
    tensors.load_model(untied, tmp_path)
    assert torch.equal(untied.head.weight, untied.embed.weight)
    with torch.no_grad():
        untied.head.weight.add_(1)
    tensors.save_model(untied, tmp_path / "untied")
    with pytest.raises(
        CheckpointError, match=r"embed\.weight and head\.weight are one tensor here, two in the checkpoint"
    ):
        tensors.load_model(small(3), tmp_path / "untied")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when torch._dynamo is imported
def test_names_are_the_users_under_every_wrapper(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = small(1)
    plain = [name for name, _ in model.named_parameters()]
    expected = bits(model)
    model.body[0] = checkpoint_wrapper(model.body[0])
    model.body[2] = torch.compile(model.body[2])
    wrapped = torch.compile(nn.DataParallel(model))
    assert [name for name, _ in tensors.named_parameters(wrapped)] == plain
    tensors.save_model(wrapped, tmp_path)
    bare = small(2)
    tensors.load_model(bare, tmp_path)
    assert bits(bare) == expected
    tensors.save_model(small(3), tmp_path / "bare")
    tensors.load_model(wrapped, tmp_path / "bare")
    tensors.load_model(bare, tmp_path / "bare")
    tensors.save_model(wrapped, tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again" / "model/model.safetensors")["body.0.weight"], bare.body[0].weight)


def test_a_users_own_submodule_called_module_keeps_its_name() -> None:
    own = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert [name for name, _ in tensors.named_parameters(own)] == ["module.weight", "module.bias"]


ELEMENTS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def test_every_element_type_and_odd_shape_survives(tmp_path: Path) -> None:
    def model(fill: int) -> nn.Module:
        module = nn.Module()
        for dtype in ELEMENTS:
            name = str(dtype).split(".")[1]
            for shape in ((), (3,), (0, 2)):
                value = torch.full(shape, fill, dtype=torch.float32).to(dtype)
                module.register_buffer(f"{name}_{len(shape)}", value)
        module.register_buffer("nan", torch.tensor([math.nan, -0.0, math.inf]) * fill)
        return module

    tensors.save_model(model(1), tmp_path)
    other = model(0)
    tensors.load_model(other, tmp_path)
    assert bits(other) == bits(model(1))
    with safe_open(
        tmp_path / "model/model.safetensors", framework="pt"
    ) as file:  # any reader of the format can open it
        assert len(file.keys()) == len(bits(other))


def test_floats_may_change_their_precision_and_integers_must_not(tmp_path: Path) -> None:
    tensors.save_model(small(1), tmp_path)
    double = small(2).double()
    tensors.load_model(double, tmp_path)
    assert torch.equal(double.turned, small(1).turned.double())
    whole = small(2)
    whole.scale = torch.tensor(2)
    with pytest.raises(CheckpointError, match=r"scale is torch\.float32 in the checkpoint, torch\.int64 here"):
        tensors.load_model(whole, tmp_path)


def test_another_models_checkpoint_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    tensors.save_model(small(1), tmp_path)
    wider = small(2, width=6)
    before = bits(wider)
    with pytest.raises(
        CheckpointError, match=r"turned is \[4, 6\] in the checkpoint, \[6, 6\] here, .* and 9 more: build"
    ):
        tensors.load_model(wider, tmp_path)
    assert bits(wider) == before
    more = small(2)
    more.extra = nn.Linear(2, 2)
    del more.scale
    more.turned = nn.Parameter(torch.zeros(2, 6))
    with pytest.raises(CheckpointError) as raised:
        tensors.load_model(more, tmp_path)
    assert str(raised.value) == (
        f"checkpoint {tmp_path} is of another model: missing keys extra.weight, extra.bias; unexpected keys scale;"
        " other shapes: turned is [4, 6] in the checkpoint, [2, 6] here: build the model as it was saved,"
        " or start without the checkpoint"
    )


def test_extra_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

    with pytest.raises(TrainingError, match="_extra_state is a dict"):
        tensors.save_model(Odd(), tmp_path)


def test_a_sparse_or_complex128_tensor_is_refused_by_name(tmp_path: Path) -> None:
    for value in (torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)):
        model = nn.Module()
        model.register_buffer("odd", value)
        with pytest.raises(TrainingError, match="odd is a"):
            tensors.save_model(model, tmp_path / str(value.layout))


def _batches(start: int, count: int) -> Iterator[torch.Tensor]:
    for i in range(start, start + count):
        yield torch.randint(0, 10, (8,), generator=torch.Generator().manual_seed(i))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, start: int, count: int) -> None:
    for batch in _batches(start, count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), batch)
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()


def _grouped(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd-momentum-fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adamw-fused-amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True, amsgrad=True),
    "adam-tensor-lr-groups": lambda m: torch.optim.Adam(_grouped(m), lr=torch.tensor(0.01), betas=(0.8, 0.95)),
    "rmsprop-centered": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
}


def _save_all(model: nn.Module, optimizer: Any, scheduler: Any, directory: Path) -> dict[str, Any]:
    tensors.save_model(model, directory)
    content = {"optimizer": optimizer_state.save_optimizer(optimizer, tensors.named_parameters(model), directory)}
    content["scheduler"] = None if scheduler is None else optimizer_state.scheduler_state(scheduler)
    return json.loads(json.dumps(content, allow_nan=False))


def _load_all(model: nn.Module, optimizer: Any, scheduler: Any, directory: Path, content: dict[str, Any]) -> None:
    tensors.load_model(model, directory)
    optimizer_state.load_optimizer(optimizer, tensors.named_parameters(model), directory, content["optimizer"])
    if scheduler is not None:
        optimizer_state.load_scheduler_state(scheduler, content["scheduler"])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    make = OPTIMIZERS[kind]
    straight = small(1)
    optimizer = make(straight)
    _train(straight, optimizer, None, 0, 3)
    content = _save_all(straight, optimizer, None, tmp_path)
    _train(straight, optimizer, None, 3, 3)

    resumed = small(9)
    again = make(resumed)
    _train(resumed, again, None, 50, 2)  # its own state must vanish
    _load_all(resumed, again, None, tmp_path, content)
    _train(resumed, again, None, 3, 3)
    assert bits(resumed) == bits(straight)
    assert [{k: str(v) for k, v in g.items() if k != "params"} for g in again.param_groups] == [
        {k: str(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]


def test_tensors_that_the_optimizer_has_are_filled_in_place(tmp_path: Path) -> None:
    model = small(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(model, optimizer, None, 0, 2)
    content = optimizer_state.save_optimizer(optimizer, tensors.named_parameters(model), tmp_path)
    first, second, *_ = model.parameters()
    before = {slot: optimizer.state[first][slot] for slot in ("exp_avg", "exp_avg_sq")}
    saved = {slot: value.clone() for slot, value in before.items()}
    optimizer.state[second]["exp_avg"] = shared = optimizer.state[second]["exp_avg_sq"]
    _train(model, optimizer, None, 2, 1)
    optimizer_state.load_optimizer(optimizer, tensors.named_parameters(model), tmp_path, content)
    for slot, value in before.items():
        assert optimizer.state[first][slot] is value and torch.equal(value, saved[slot])
    loaded = optimizer.state[second]
    assert loaded["exp_avg"] is not shared and not torch.equal(loaded["exp_avg"], loaded["exp_avg_sq"])


def test_optimizer_tensors_are_named_after_their_parameters(tmp_path: Path) -> None:
    model = small(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(model, optimizer, None, 0, 1)
    optimizer_state.save_optimizer(optimizer, tensors.named_parameters(model), tmp_path)
    stored = load_file(tmp_path / "optimizer/optimizer.safetensors")
    slots = {"step", "exp_avg", "exp_avg_sq"}
    assert set(stored) == {f"state.{name}.{slot}" for name, _ in model.named_parameters() for slot in slots}


def test_a_fresh_optimizer_and_parameters_outside_the_model_can_be_stored(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, list[nn.Parameter], torch.optim.Optimizer]:
        model, others = small(1), [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
        return model, others, torch.optim.SGD([*model.parameters(), *others], lr=0.1, momentum=0.9)

    model, others, optimizer = make()
    content = optimizer_state.save_optimizer(optimizer, tensors.named_parameters(model), tmp_path / "fresh")
    optimizer.state[others[0]]["momentum_buffer"] = torch.ones(2)
    optimizer_state.load_optimizer(optimizer, tensors.named_parameters(model), tmp_path / "fresh", content)
    assert not optimizer.state
    others[1].grad = torch.full((3,), 2.0)
    optimizer.step()
    content = optimizer_state.save_optimizer(optimizer, tensors.named_parameters(model), tmp_path)
    assert content["groups"][0]["params"][-2:] == ["extra.0", "extra.1"]
    model, others, optimizer = make()
    optimizer_state.load_optimizer(optimizer, tensors.named_parameters(model), tmp_path, content)
    assert torch.equal(optimizer.state[others[1]]["momentum_buffer"], torch.full((3,), 2.0))


def test_slots_follow_their_parameters_precision_unless_they_had_their_own(tmp_path: Path) -> None:
    def make(dtype: torch.dtype, moment: torch.dtype) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), 1 / 3, dtype=moment)
        return parameter, optimizer

    def moved(source: tuple[torch.dtype, torch.dtype], target: torch.dtype) -> torch.dtype:
        parameter, optimizer = make(*source)
        content = optimizer_state.save_optimizer(optimizer, [("w", parameter)], tmp_path / f"{source}")
        parameter, optimizer = make(target, target)
        optimizer_state.load_optimizer(optimizer, [("w", parameter)], tmp_path / f"{source}", content)
        return optimizer.state[parameter]["momentum_buffer"].dtype

    assert moved((torch.float32, torch.float32), torch.float64) == torch.float64
    assert moved((torch.bfloat16, torch.float32), torch.bfloat16) == torch.float32


def test_how_updates_are_computed_is_not_taken_from_the_checkpoint(tmp_path: Path) -> None:
    model = small(1)
    content = _save_all(model, torch.optim.SGD(model.parameters(), lr=0.5, fused=True), None, tmp_path)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    _load_all(model, plain, None, tmp_path, content)
    group = plain.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, None, True)


def test_another_optimizer_or_other_groups_are_refused_by_name(tmp_path: Path) -> None:
    model = small(1)
    content = _save_all(model, torch.optim.SGD(_grouped(model), lr=0.1), None, tmp_path)["optimizer"]
    wrong = {
        "is Adam, the checkpoint holds SGD": torch.optim.Adam(model.parameters()),
        "has 1 parameter groups, but the checkpoint has 2": torch.optim.SGD(model.parameters(), lr=0.1),
        "group 0 holds .* here but not in the checkpoint": torch.optim.SGD(
            [{"params": list(model.parameters())[:-1]}, {"params": list(model.parameters())[-1:]}], lr=0.1
        ),
    }
    for message, optimizer in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            optimizer_state.load_optimizer(optimizer, tensors.named_parameters(model), tmp_path, content)
    for odd in ({}, content | {"groups": [1]}, content | {"groups": [{"params": []}]}, content | {"values": []}):
        with pytest.raises(CheckpointError, match="does not hold an optimizer"):
            optimizer_state.load_optimizer(optimizer, tensors.named_parameters(model), tmp_path, odd)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", None), ("lr", "0.1"), ("lr", [0.1]), ("eps", "x"), ("betas", [0.9]), ("betas", ["a", "b"]), ("amsgrad", 1),
        ("weight_decay", True),
    ],
)  # fmt: skip
def test_options_of_another_kind_are_refused_by_name(tmp_path: Path, option: str, value: Any) -> None:
    """A checkpoint that somebody has edited."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    content = optimizer_state.save_optimizer(optimizer, tensors.named_parameters(model), tmp_path)
    optimizer_state.load_optimizer(optimizer, tensors.named_parameters(model), tmp_path, content)
    content["groups"][0]["options"][option] = value
    with pytest.raises(CheckpointError, match=re.escape(f"state.json has {option}={value!r} in parameter group 0")):
        optimizer_state.load_optimizer(optimizer, tensors.named_parameters(model), tmp_path, content)


def test_an_optimizer_slot_that_is_no_data_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(CheckpointError, match=r"state\.weight\.old_dirs\[0\] is a torch\.Tensor"):
        optimizer_state.save_optimizer(optimizer, tensors.named_parameters(model), tmp_path)
    optimizer.state.clear()
    optimizer.state[model.weight]["history"] = {1, 2}
    with pytest.raises(CheckpointError, match=r"state\.weight\.history is a builtins\.set"):
        optimizer_state.save_optimizer(optimizer, tensors.named_parameters(model), tmp_path)


class Halving:
    """A schedule function with a state of its own."""

    def __init__(self) -> None:
        self.calls, self.bounds = 0, (0.1, math.inf)

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


def _sequential(o: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(o, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(o, [warm, lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[3])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 6], gamma=0.3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "warm-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, mode="exp_range", gamma=0.9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "lambda-object": lambda o: lr_scheduler.LambdaLR(o, Halving()),
    "lambda-partial": lambda o: lr_scheduler.LambdaLR(o, functools.partial(pow, 0.9)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "sequential": _sequential,
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = small(seed)
        optimizer = torch.optim.SGD(_grouped(model), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULES[kind](optimizer)

    straight = make(1)
    _train(*straight, 0, 5)
    content = _save_all(*straight, tmp_path)
    state = straight[2].state_dict()
    resumed = make(9)
    _load_all(*resumed, tmp_path, content)
    assert str(resumed[2].state_dict()) == str(state)
    for run in (straight, resumed):
        _train(*run, 5, 6)
    assert [g["lr"] for g in resumed[1].param_groups] == [g["lr"] for g in straight[1].param_groups]
    assert bits(resumed[0]) == bits(straight[0])


def test_a_schedules_infinity_counter_and_tuple_come_back_as_they_were() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    content = json.loads(json.dumps(optimizer_state.scheduler_state(plateau), allow_nan=False))
    plateau.best = 0.0
    optimizer_state.load_scheduler_state(plateau, content)
    assert plateau.best == math.inf
    value = {"a": (1, [2.5, (math.nan,)]), 3: None, "__tuple__": 1, "t": torch.tensor([0.1], dtype=torch.bfloat16)}
    content = tensor_io.encode_state(value, "x", tensor_io.encode_tensor)
    back = tensor_io.decode_state(json.loads(json.dumps(content, allow_nan=False)))
    assert repr(back) == repr(value)
    for odd in ({"__tensor__": {"dtype": "X", "shape": [1], "bytes": "00"}}, {"__tensor__": 1}, {"__code__": "x"}):
        with pytest.raises(CheckpointError, match="not what was saved"):
            tensor_io.decode_state(odd)


def _draws() -> list[Any]:
    return [
        torch.randn(5).tolist(), random.random(), random.gauss(0, 1), random.randbytes(3).hex(),
        np.random.rand(3).tolist(), np.random.standard_normal(), np.random.randint(0, 1000, 3).tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("odd", [0, 1])
def test_all_generators_come_back_bit_for_bit(tmp_path: Path, odd: int) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    for _ in range(odd):  # half of a pair of normals is in store
        torch.randn(1)
        random.gauss(0, 1)
        np.random.standard_normal()
    tensors.save_rng(tmp_path, 2, CPU)
    expected = [_draws(), _draws()]
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(99)
    assert tensors.load_rng(tmp_path, 2, CPU) is True
    assert [_draws(), _draws()] == expected
    with pytest.raises(
        CheckpointError, match=r"rank-0\.safetensors is missing, which has the random generators of rank 0"
    ):
        tensors.load_rng(tmp_path, 0, CPU)


def test_generator_states_that_are_none_are_refused(tmp_path: Path) -> None:
    tensor_io.write_file(generators.rng_file(tmp_path, 0), {"torch": torch.zeros(7, dtype=torch.uint8)}, {})
    with pytest.raises(CheckpointError, match="generator states"):
        tensors.load_rng(tmp_path, 0, CPU)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04cos\nsystem\n", (1 << 40).to_bytes(8, "little") + b"{}", (90 << 20).to_bytes(8, "little") + b"{}",
     (2).to_bytes(8, "little") + b"{}junk", (9).to_bytes(8, "little") + b'{"a":{}} '],
)  # fmt: skip
def test_a_file_that_holds_no_tensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        tensors.load_model(small(1), tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_optimizer_and_generator_of_a_gpu_come_back_there_and_on_the_cpu(tmp_path: Path) -> None:
    model = small(1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in _batches(0, 2):
        model(batch.cuda()).square().mean().backward()
        optimizer.step()
    content = _save_all(model, optimizer, None, tmp_path)
    tensors.save_rng(tmp_path, 0, torch.device("cuda", 0))
    drawn = torch.randn(3, device="cuda")
    for device in ("cuda", "cpu"):
        other = small(2).to(device)
        again = torch.optim.AdamW(other.parameters(), lr=0.5)
        _load_all(other, again, None, tmp_path, content)
        assert bits(other) == bits(model)
        for slots in again.state.values():
            assert (slots["exp_avg"].device.type, slots["step"].device.type) == (device, "cpu")
    tensors.load_rng(tmp_path, 0, torch.device("cuda", 0))
    assert torch.equal(torch.randn(3, device="cuda"), drawn)
