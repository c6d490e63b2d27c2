"""Locate each parameter in ZeRO's partitions, the flat fp32 tensors that the optimizer updates, and convert between
partitions and whole tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from distributed.backends._deepspeed.held_slots import HeldSlot
from distributed.backends._torch.sharding import StandIns
from distributed.backends._torch.world import TorchWorld
from distributed.errors import CheckpointError

State = dict[
    torch.Tensor, dict[str, Any]
]  # like Optimizer.state: the slots of each parameter, some of which may be `HeldSlot`s


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of one parameter on this rank: its elements from `start` to `start + length`, which begin at `offset` in
    `flat`."""

    flat: torch.Tensor
    offset: int
    start: int
    length: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this piece of a tensor with the layout of `self.flat`."""
        return flat.detach().narrow(0, self.offset, self.length)


class Partitions:
    """The pieces of the trainable parameters on this rank. All ranks create it after the same `deepspeed.initialize`,
    and all ranks call each method."""

    def __init__(self, zero: Any, parameters: Iterable[torch.nn.Parameter], stage: int, world: TorchWorld) -> None:
        """Find the pieces. `zero` is DeepSpeed's optimizer of stage 1, 2 or 3."""
        find = _find_sharded if stage == 3 else _find_flattened
        self._shapes = {p: torch.Size(getattr(p, "ds_shape", p.shape)) for p in parameters}
        self._pieces = {p: find(zero, p) for p in self._shapes}
        self.flats: list[torch.Tensor] = list(
            zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        )
        self._flat_of = {p: _flat_index(zero, p, stage) for p in self._shapes}
        self._world, self._device = world, torch.device(world.context.device)
        self.stand_ins = StandIns()
        # (parameter, slot or None) -> (the partition, its address, the stand-in)
        self._made: dict[tuple[torch.nn.Parameter, str | None], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def whole(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the whole parameter in fp32, on this rank's device. A collective."""
        piece = self._pieces[parameter]
        return self._assemble(parameter, None if piece is None else piece.of(piece.flat))

    def set_whole(self, values: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Set the fp32 parameters to these values, without communication."""
        for parameter, value in values.items():
            if (piece := self._pieces[parameter]) is not None:
                _copy(piece.of(piece.flat), value, piece)

    def weights(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return a stand-in for each parameter in fp32, of which this rank has a piece."""
        flats = {parameter: self.flats[self._flat_of[parameter]] for parameter in self._shapes}
        return {parameter: self._stand_in(parameter, None, flat) for parameter, flat in flats.items()}

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """Return the optimizer's state of whole parameters, with stand-ins for the tensors of which this rank has a piece.

        Its other values are those of the optimizer itself, not copies.
        """
        found: State = {}
        for parameter in self._shapes:
            flat = self.flats[self._flat_of[parameter]]
            slots = {
                name: self._stand_in(parameter, name, value) if _is_like(value, flat) else value
                for name, value in optimizer.state.get(flat, {}).items()
            }
            if slots:
                found[parameter] = slots
        return found

    def _stand_in(self, parameter: torch.nn.Parameter, slot: str | None, value: torch.Tensor) -> torch.Tensor:
        """Return the stand-in for a tensor of the parameter's shape whose partition is `value`, the same one in each save as long as the
        partition has the same memory."""
        before, address, found = self._made.get((parameter, slot), (None, 0, None))
        if found is not None and before is value and address == value.data_ptr():
            return found
        if found is not None:
            self.stand_ins.forget([found])
        piece = self._pieces[parameter]
        mine = value[:0].detach() if piece is None else piece.of(value)
        made = self.stand_ins.make(self._shapes[parameter], mine, 0 if piece is None else piece.start)
        self._made[parameter, slot] = value, value.data_ptr(), made
        return made

    def set_state(self, optimizer: torch.optim.Optimizer, state: State, names: Mapping[torch.Tensor, str]) -> None:
        """Partition the state of whole parameters into `optimizer`'s state, without communication."""
        for index, flat in enumerate(self.flats):
            members = [p for p in self._shapes if self._flat_of[p] == index]
            if any(state.get(p) for p in members):
                optimizer.state[flat] = self._cut(flat, members, state, names)

    def take_over(self, optimizer: torch.optim.Optimizer, other: Partitions, state: State) -> None:
        """Give `optimizer` the state from the partitions `other` of the same parameters."""
        for flat, before in zip(self.flats, other.flats, strict=True):
            if before in state:
                optimizer.state[flat] = state[before]

    def _cut(self, flat: torch.Tensor, members: list[Any], state: State, names: Mapping[Any, str]) -> dict[str, Any]:
        """Return the slots for the partition `flat`, cut from the slots of the whole parameters `members`."""
        slots: dict[str, Any] = {}
        first = next(p for p in members if state.get(p))
        for name, value in state[first].items():
            if isinstance(value, torch.Tensor | HeldSlot) and value.shape == self._shapes[first] and name != "step":
                slots[name] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
                self._fill(slots[name], name, members, state)
                continue
            slots[name] = copy.deepcopy(value)
            for other in members:
                if not _same(state.get(other, {}).get(name), value):
                    raise CheckpointError(
                        f"the optimizer's {name} of {names[first]} and of {names[other]} differ, but deepspeed keeps one for"
                        " both: start without the checkpoint, or use backend 'fsdp'"
                    )
        return slots

    def _fill(self, target: torch.Tensor, name: str, members: list[Any], state: State) -> None:
        for parameter in members:
            piece, slots = self._pieces[parameter], state.get(parameter, {})
            if piece is not None and name in slots:
                if isinstance(value := slots[name], HeldSlot):
                    value.copy_to(piece.of(target), piece.start)
                else:
                    _copy(piece.of(target), value, piece)

    def _assemble(self, parameter: torch.nn.Parameter, mine: torch.Tensor | None) -> torch.Tensor:
        """Return all ranks' pieces as one tensor. The pieces are summed as integers, so that adding the zeros of other
        ranks changes no bit."""
        shape, piece = self._shapes[parameter], self._pieces[parameter]
        bits = torch.zeros(shape.numel(), dtype=torch.int32, device=self._device)
        if mine is not None and piece is not None:
            bits[piece.start : piece.start + piece.length] = mine.to(self._device, torch.float32).view(torch.int32)
        self._world.combine(bits, "sum").wait()
        return bits.view(torch.float32).reshape(shape)


def _find_flattened(zero: Any, parameter: Any) -> Piece | None:
    """Return this rank's piece at stages 1 and 2. DeepSpeed concatenates the parameters of a parameter group and splits the
    result."""
    found = parameter._hp_mapping
    if found is None:
        return None
    inside, here = found.lp_fragment_address, found.hp_fragment_address
    flat = zero.single_partition_of_fp32_groups[found.param_group_index]
    return Piece(flat, here.start, inside.start, inside.numel)


def _find_sharded(zero: Any, parameter: Any) -> Piece | None:
    """Return this rank's piece at stage 3. DeepSpeed splits each parameter, and pads the last pieces to equal
    length."""
    index, offset, length = zero.grad_position[zero.get_param_id(parameter)]
    start = zero._get_param_partition_rank(parameter) * parameter.partition_numel()
    length = min(length, parameter.ds_numel - start)
    return Piece(zero.fp32_partitioned_groups_flat[index], offset, start, length) if length > 0 else None


def _flat_index(zero: Any, parameter: Any, stage: int) -> int:
    if stage == 3:
        return int(zero.grad_position[zero.get_param_id(parameter)][0])
    return next(i for i, group in enumerate(zero.bit16_groups) if any(p is parameter for p in group))


def _is_like(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _copy(target: torch.Tensor, whole: torch.Tensor, piece: Piece) -> None:
    target.copy_(whole.detach().reshape(-1)[piece.start : piece.start + piece.length])


def with_whole(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the optimizer's current parameter groups with the parameters of `groups` in place of DeepSpeed's partitions."""
    return [{**now, "params": list(of["params"])} for now, of in zip(optimizer.param_groups, groups, strict=True)]


def stand_in(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: State) -> torch.optim.Optimizer:
    """Return a copy of `optimizer` with whole parameters: the same class and options."""
    other = copy.copy(optimizer)
    other.param_groups = with_whole(optimizer, groups)
    other.state = defaultdict(dict, state)
    return other


def iterate(groups: list[dict[str, Any]]) -> Iterator[torch.nn.Parameter]:
    """Yield the trainable parameters of parameter groups, in order."""
    for group in groups:
        yield from (p for p in group["params"] if p.requires_grad)
