"""Tensors of which each rank holds a part: what the ranks write, and what is read from it."""

from __future__ import annotations

import contextlib
import json
import random
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from distributed.backends._deepspeed.held_slots import HeldSlots  # noqa: E402
from distributed.backends._torch import sharding  # noqa: E402
from distributed.backends._torch.sharding import StandIns  # noqa: E402
from distributed.backends._torch.tensor_io import write_file  # noqa: E402
from distributed.backends._torch.tensors import saves_its_parameters  # noqa: E402
from distributed.checkpoints import digests  # noqa: E402
from distributed.checkpoints.shards import read_tensors, sharding_metadata  # noqa: E402
from distributed.checkpoints.staging import Staging  # noqa: E402
from distributed.errors import CheckpointError  # noqa: E402
from distributed.state import WorkerContext  # noqa: E402


def saved(directory: Path, tensors: dict[str, torch.Tensor], cuts: list[dict[str, int]]) -> None:
    """Save as many ranks do, each of which has the elements from one of the `cuts` of each tensor to the next."""
    directory.mkdir()
    world_size = len(cuts) - 1
    for rank in range(world_size):
        stand_ins, mine = StandIns(), {}
        for name, tensor in tensors.items():
            first, end = cuts[rank][name], cuts[rank + 1][name]
            mine[name] = stand_ins.make(tensor.shape, tensor.reshape(-1)[first:end], first)
        plain = {"step": torch.tensor(3.0), **mine}
        with stand_ins.written():
            sharding.write(directory, "model", plain, WorkerContext(rank, world_size, rank, world_size, 0, "cpu"))


def drawn_tensors(draw: random.Random) -> dict[str, torch.Tensor]:
    shapes = [tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4))) for _ in range(5)] + [(0, 3), (7,)]
    return {f"w{number}": torch.randn(shape) for number, shape in enumerate(shapes)}


def drawn_cuts(draw: random.Random, tensors: dict[str, torch.Tensor], world_size: int) -> list[dict[str, int]]:
    """Return where each rank's part of each tensor begins, and the ends of the last parts."""
    inner = {
        name: sorted(draw.choices(range(tensor.numel() + 1), k=world_size - 1)) for name, tensor in tensors.items()
    }
    return [
        dict.fromkeys(tensors, 0),
        *({name: inner[name][number] for name in tensors} for number in range(world_size - 1)),
        {name: tensor.numel() for name, tensor in tensors.items()},
    ]


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_of_any_shape_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(digests, "LARGE_BYTES", draw.choice([1, 64, 1 << 20]))
    tensors = drawn_tensors(draw)
    saved(tmp_path / "model", tensors, drawn_cuts(draw, tensors, draw.randint(1, 4)))
    stored, _ = read_tensors(tmp_path / "model")
    assert stored.keys() == {"step", *tensors}
    for name, tensor in tensors.items():
        assert torch.equal(sharding.read(stored[name]), tensor)
        filled = torch.full(tensor.shape, torch.nan)
        reader = sharding.reader(stored[name], filled)
        if reader is not None:
            reader()
            assert torch.equal(filled, tensor)
        assert tensor.numel() == 0 or reader is not None


@pytest.mark.parametrize("seed", range(20))
def test_held_slots_give_each_rank_any_part_and_its_own_part_is_read_at_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tensors, world_size = drawn_tensors(draw), draw.randint(1, 4)
    saved_cuts = drawn_cuts(draw, tensors, world_size)
    saved(tmp_path / "model", tensors, saved_cuts)
    now = draw.choice([world_size, draw.randint(1, 4)])
    cuts = saved_cuts if now == world_size and draw.random() < 0.5 else drawn_cuts(draw, tensors, now)
    for rank in range(now):
        stored, _ = read_tensors(tmp_path / "model")
        held = HeldSlots(rank, now)
        readers = [
            reader for name in tensors for reader in held.add(tensors[name], "slot", stored[name], torch.float32)
        ]
        for reader in readers:
            reader()
        slots = {parameter: slot for parameter, _, slot in held}
        for name, tensor in tensors.items():
            first, end = cuts[rank][name], cuts[rank + 1][name]
            part = torch.full((end - first,), torch.nan)
            slots[tensor].copy_to(part, first)
            assert torch.equal(part, tensor.reshape(-1)[first:end])
            assert torch.equal(slots[tensor].whole(torch.device("cpu")), tensor)
        assert held.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        if cuts is saved_cuts and world_size > 1:
            contents = {file: file.read_bytes() for file in (tmp_path / "model").iterdir()}
            for file, content in contents.items():
                file.write_bytes(bytes(len(content)))  # the mapped memory changes too
            for name, tensor in tensors.items():
                first, end = cuts[rank][name], cuts[rank + 1][name]
                part = torch.full((end - first,), torch.nan)
                slots[tensor].copy_to(part, first)
                assert torch.equal(part, tensor.reshape(-1)[first:end]), "this rank's part was not read before"
            for file, content in contents.items():
                file.write_bytes(content)


def row_cuts(draw: random.Random, tensors: dict[str, torch.Tensor], world_size: int) -> list[dict[str, int]]:
    """Return cuts between rows, so that each rank has at most one piece of each tensor, as FSDP cuts them."""
    inner = {name: sorted(draw.choices(range(len(tensor) + 1), k=world_size - 1)) for name, tensor in tensors.items()}
    cuts = [
        {name: inner[name][number] * (tensor.numel() // max(1, len(tensor))) for name, tensor in tensors.items()}
        for number in range(world_size - 1)
    ]
    return [dict.fromkeys(tensors, 0), *cuts, {name: tensor.numel() for name, tensor in tensors.items()}]


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_reads_its_own_file_and_others_only_if_it_needs_them(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tensors = {name: tensor for name, tensor in drawn_tensors(draw).items() if tensor.dim()}
    world_size = draw.randint(1, 4)
    cuts = row_cuts(draw, tensors, world_size)
    saved(tmp_path / "model", tensors, cuts)
    in_full, _ = read_tensors(tmp_path / "model")
    for rank in range(world_size):
        stored, _ = read_tensors(tmp_path / "model", (rank, world_size))
        assert {name: (each.dtype, each.shape) for name, each in stored.items()} == {
            name: (each.dtype, each.shape) for name, each in in_full.items()
        }
        if draw.random() < 0.5:  # a part that is not its own
            for name, tensor in tensors.items():
                assert torch.equal(sharding.read(stored[name]), tensor)
                start = tuple(draw.randint(0, size) for size in tensor.shape)
                shape = tuple(draw.randint(0, size - begin) for begin, size in zip(start, tensor.shape, strict=True))
                part = tensor[tuple(slice(b, b + n) for b, n in zip(start, shape, strict=True))]
                assert bytes(stored[name].read((start, shape))) == part.numpy().tobytes()

    rank = draw.randrange(world_size)
    stored, _ = read_tensors(tmp_path / "model", (rank, world_size))
    for path in (tmp_path / "model").glob("model-0*"):
        if path.name != f"model-{rank + 1:05d}-of-{world_size:05d}.safetensors":
            path.unlink()
    assert float(sharding.read(stored["step"])) == 3
    for name, tensor in tensors.items():
        part = tensor.reshape(-1)[cuts[rank][name] : cuts[rank + 1][name]]
        rows = part.numel() // max(1, tensor[:1].numel()) if tensor.numel() else 0
        box = ((cuts[rank][name] // max(1, tensor[:1].numel()), *[0] * (tensor.dim() - 1)), (rows, *tensor.shape[1:]))
        assert bytes(stored[name].read(box)) == part.numpy().tobytes()


def test_files_of_pieces_do_not_depend_on_the_order_of_the_tensors(tmp_path: Path) -> None:
    """An optimizer has its slots in another order after a load."""
    tensors = {name: torch.randn(4, 3) for name in "cab"}
    cuts = [dict.fromkeys(tensors, 0), dict.fromkeys(tensors, 6), dict.fromkeys(tensors, 12)]
    saved(tmp_path / "one", tensors, cuts)
    saved(tmp_path / "other", dict(sorted(tensors.items())), cuts)
    files = [sorted((tmp_path / name).iterdir()) for name in ("one", "other")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


WHOLES = {"w": ["F32", 4, 3]}


@pytest.mark.parametrize(
    "wholes",
    ["{", "[]", {}, {"w": []}, {"w": ["F32", 4]}, {"w": ["F32", 1, 3]}, {"w": ["F32", -4, 3]}, {"w": ["F64", 4, 3]}, {"w": ["F3", 4, 3]},
     {"w": ["F32", 10**30, 3]}, {"w": {"F32": 4}}, {"w": [["F32"], 4, 3]}],
)  # fmt: skip
def test_damaged_shapes_of_whole_tensors_are_refused(tmp_path: Path, wholes: object) -> None:
    def write(content: object) -> None:
        metadata = sharding_metadata({"w": (2, 0)}) | {
            "whole_tensors": content if isinstance(content, str) else json.dumps(content)
        }
        write_file(tmp_path / "model" / "model-00002-of-00002.safetensors", {"w": torch.ones(2, 3)}, metadata)

    write(WHOLES)
    assert read_tensors(tmp_path / "model", (1, 2))[0]["w"].shape == (4, 3)
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    write(wholes)
    with pytest.raises(CheckpointError, match=r"damaged|is not one of a tensor"):
        read_tensors(tmp_path / "model", (1, 2))


def test_pieces_that_make_another_tensor_than_the_own_file_says_are_refused(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 3)}
    saved(tmp_path / "model", tensors, [{"w": 0}, {"w": 6}, {"w": 12}])
    stored, _ = read_tensors(tmp_path / "model", (0, 2))
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    write_file(
        tmp_path / "model" / "model-00002-of-00002.safetensors",
        {"w": torch.ones(1, 3)},
        sharding_metadata({"w": (2, 0)}),
    )
    with pytest.raises(CheckpointError, match=r"the pieces of w do not form one tensor of F32 and shape \[4, 3\]"):
        stored["w"].read()


def test_a_stand_in_has_no_memory_and_a_parameter_takes_its_place() -> None:
    stand_ins = StandIns()
    value = torch.arange(6.0)
    found = stand_ins.make(torch.Size([1000, 1000]), value, 1999)
    assert (found.shape, found.dtype) == ((1000, 1000), torch.float32)
    assert found.untyped_storage().nbytes() == 4 and found[3, 4].isnan()
    pieces = stand_ins.pieces(found)
    assert pieces is not None
    assert [(start, piece.tolist()) for start, piece in pieces] == [
        ((1, 999), [[0.0]]),
        ((2, 0), [[1.0, 2.0, 3.0, 4.0, 5.0]]),
    ]
    parameter = torch.nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
    stand_ins.set_data(parameter, found)
    assert (parameter.shape, parameter.dtype) == (found.shape, torch.float32)
    assert stand_ins.pieces(parameter) is pieces
    assert stand_ins.pieces(value) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_files_of_pieces_and_whole_tensors(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    tensors = {"w": torch.randn(5, 3), "b": torch.randn(5)}
    saved(tmp_path / "model", tensors, [dict.fromkeys(tensors, 0), {"w": 7, "b": 2}, {"w": 15, "b": 5}])
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()} | {"step": torch.tensor(0.0)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "model")), no_dist=True)
    for name, tensor in (tensors | {"step": torch.tensor(3.0)}).items():
        assert torch.equal(target[name], tensor)


def test_a_model_that_makes_other_tensors_for_its_state_is_told_from_one_that_does_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    assert saves_its_parameters(model)
    model[0].register_state_dict_post_hook(lambda module, state, *_: state.update(weight=module.weight.detach()))
    assert not saves_its_parameters(model)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 6)])
def test_a_tensor_of_other_strides_or_another_element_type_is_filled_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(digests, "LARGE_BYTES", 1)
    tensor = torch.randn(shape)
    sharding.write(tmp_path / "model", "model", {"w": tensor}, WorkerContext(0, 1, 0, 1, 0, "cpu"))
    stored = read_tensors(tmp_path / "model")[0]["w"]
    reversed_strides = torch.full(shape[::-1], torch.nan).permute(tuple(reversed(range(len(shape)))))
    for own in (
        reversed_strides,
        torch.full(shape, torch.nan, dtype=torch.float64),
        torch.nn.Parameter(torch.ones(shape)),
        torch.full((*shape, 3), torch.nan)[..., 0],
    ):
        assert own.shape == tensor.shape
        reader = sharding.reader(stored, own)
        assert reader is not None
        reader()
        assert torch.equal(own, tensor.to(own.dtype))


def test_the_same_tensors_are_copied_to_the_places_of_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save must have the files that a save to the disk would have, whatever changed since the last one."""
    one, staging = WorkerContext(0, 1, 0, 1, 0, "cpu"), Staging()
    tensors = {
        "b": torch.randn(3, 4),
        "a": torch.randn(5).to(torch.bfloat16),
        "empty": torch.empty(0, 2),
        "s": torch.tensor(1.0),
    }
    layouts = list[str]()
    monkeypatch.setattr(
        sharding, "write_file", lambda path, *args: (layouts.append(path.name), write_file(path, *args))[1]
    )

    def save(number: int, **metadata: str) -> list[str]:
        """Save and compare. Return the files that got a new layout."""
        stage, plain = tmp_path / str(number), tmp_path / f"plain-{number}"
        stage.mkdir()
        layouts.clear()
        with staging.copying(stage):
            sharding.write(stage / "model", "model", tensors, one, **metadata)
        made = [*layouts]
        written = staging.write()
        sharding.write(plain, "model", tensors, one, **metadata)
        assert [path.name for path in written] == [path.name for path in plain.iterdir()] == ["model.safetensors"]
        for path in written:
            assert path.read_bytes() == (plain / path.name).read_bytes()
        return made

    assert save(0) == ["model.safetensors"]
    for number in range(1, 4):
        tensors["b"] += number
        assert save(number) == []
    assert save(4, aliases="{}") == ["model.safetensors"]
    assert save(5, aliases="{}") == []
    tensors["b"] = tensors["b"].clone()
    assert save(6, aliases="{}") == ["model.safetensors"]
    tensors["b"].data = torch.randn(2, 2)
    assert save(7, aliases="{}") == ["model.safetensors"]
    tensors["b"].data = tensors["b"].double()
    assert save(8, aliases="{}") == ["model.safetensors"]
    for number, changed in enumerate((torch.empty(0, 3), torch.empty(0, 3).double(), torch.randn(2)), 9):
        tensors["empty"].data = changed
        assert save(number, aliases="{}") == ["model.safetensors"]
    tensors["new"] = torch.randn(2)
    assert save(12, aliases="{}") == ["model.safetensors"]
    del tensors["a"]
    assert save(13, aliases="{}") == ["model.safetensors"]
    assert save(14, aliases="{}") == []


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_copied_to_the_places_of_the_last_save(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tensors, world_size = drawn_tensors(draw), draw.randint(1, 4)
    cuts, rank = drawn_cuts(draw, tensors, world_size), draw.randrange(world_size)
    context, stand_ins, staging = WorkerContext(rank, world_size, rank, world_size, 0, "cpu"), StandIns(), Staging()
    made = {
        name: stand_ins.make(
            tensor.shape, tensor.reshape(-1)[cuts[rank][name] : cuts[rank + 1][name]], cuts[rank][name]
        )
        for name, tensor in tensors.items()
    }
    mine = {"step": torch.tensor(3.0), **made}
    for number in range(6):
        for tensor in (mine["step"], *tensors.values()):
            tensor += number
        (tmp_path / str(number)).mkdir()
        # in the fourth save, the tensors are whole
        kind = contextlib.nullcontext if number == 3 else stand_ins.written
        with kind(), staging.copying(tmp_path / str(number)):
            sharding.write(tmp_path / str(number) / "model", "model", mine, context, some="data")
        staging.write()
        with kind():
            sharding.write(tmp_path / f"plain-{number}", "model", mine, context, some="data")
        ours, plain = (
            {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")}
            for name in (str(number), f"plain-{number}")
        )
        assert ours == plain and bool(ours) == (number != 3 or rank == 0)
        if number == 1:  # a tensor that stands for other elements
            name = draw.choice([*tensors])
            stand_ins.forget([mine[name]])
            tensors[name] = torch.randn(9)
            mine[name] = stand_ins.make(torch.Size([9]), tensors[name][1:7], 1)


def test_the_places_of_the_last_save_keep_no_tensor_alive(tmp_path: Path) -> None:
    staging, tensors = Staging(), {"a": torch.randn(3)}
    with staging.copying(tmp_path):
        sharding.write(tmp_path, "model", tensors, WorkerContext(0, 1, 0, 1, 0, "cpu"))
    seen = weakref.ref(tensors.pop("a"))
    assert seen() is None
