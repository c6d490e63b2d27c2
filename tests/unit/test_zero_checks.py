"""Checks of a model before ZeRO's engine exists, and the memory for copies of its state."""

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from distributed.backends._deepspeed.copying import DeepSpeedCopying  # noqa: E402
from distributed.backends._deepspeed.engine import check  # noqa: E402
from distributed.backends._deepspeed.held_slots import HeldSlots  # noqa: E402
from distributed.backends._deepspeed.partitions import Partitions  # noqa: E402
from distributed.checkpoints.shards import StoredTensor  # noqa: E402
from distributed.errors import ConfigError  # noqa: E402


@pytest.mark.parametrize(("stage", "is_trained", "is_refused"), [(1, True, True), (2, False, False), (3, False, True)])
def test_a_parameter_without_elements(stage: int, is_trained: bool, is_refused: bool) -> None:
    model = torch.nn.Linear(3, 2)
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 4), requires_grad=is_trained))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"^empty has no elements, and DeepSpeed cannot cut it: remove it, or use"
        ):
            check(model, optimizer, stage, allows_any=False)
    else:
        check(model, optimizer, stage, allows_any=False)


def backend_of(stage: int, rank: int, held: HeldSlots | None = None) -> Any:
    model = torch.nn.Linear(30, 10)
    return types.SimpleNamespace(
        stage=stage, plain=model, optimizer=torch.optim.AdamW(model.parameters()),
        wrapper=types.SimpleNamespace(engine=None, held=held),
        context=types.SimpleNamespace(world_size=2, is_main_process=rank == 0),
    )  # fmt: skip


@pytest.mark.parametrize(("stage", "rank", "parts"), [(0, 0, 1), (0, 1, 0), (1, 0, 0.5), (1, 1, 0.5), (3, 1, 0.5)])
def test_from_stage_1_on_each_of_two_ranks_copies_half_of_the_state(stage: int, rank: int, parts: float) -> None:
    whole = 3 * 4 * 310  # weights and two moments
    assert DeepSpeedCopying(backend_of(stage, rank)).num_bytes() == (parts * whole, parts * whole)


def test_the_state_of_a_checkpoint_counts_before_the_engine_has_it() -> None:
    held = HeldSlots(0, 2)
    backend = backend_of(2, 0, held)
    for parameter in backend.plain.parameters():
        backend.optimizer.state[parameter]["step"] = torch.tensor(3.0)
        for slot in ("exp_avg", "exp_avg_sq"):
            held.add(parameter, slot, StoredTensor(slot, "F32", tuple(parameter.shape), ()), torch.float32)
    assert DeepSpeedCopying(backend).num_bytes() == (3 * 4 * 310 / 2, 3 * 4 * 310 / 2)


def test_a_partition_that_has_moved_is_saved_from_its_new_memory() -> None:
    """DeepSpeed moves partitions with `offload_states` and `reload_states`."""
    parameter, flat = torch.nn.Parameter(torch.empty(2, 3)), torch.arange(6.0)
    address = types.SimpleNamespace(start=0, numel=6)
    parameter._hp_mapping = types.SimpleNamespace(
        lp_fragment_address=address, hp_fragment_address=address, param_group_index=0
    )
    zero = types.SimpleNamespace(single_partition_of_fp32_groups=[flat], bit16_groups=[[parameter]])
    world = types.SimpleNamespace(context=types.SimpleNamespace(device="cpu"))
    partitions = Partitions(zero, [parameter], 1, world)

    def saved() -> tuple[Any, Any]:
        (made,) = partitions.weights().values()
        ((_, piece),) = partitions.stand_ins.pieces(made)
        return made, piece.flatten().tolist()

    first, values = saved()
    assert values == [0, 1, 2, 3, 4, 5]
    flat += 1
    assert saved() == (first, [1, 2, 3, 4, 5, 6])
    flat.data = flat + 1
    assert saved()[1] == [2, 3, 4, 5, 6, 7]
