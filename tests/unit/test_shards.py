"""Tensors that lie in pieces over several files."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy
import pytest

from distributed.checkpoints.shards import read_tensors, sharding_metadata
from distributed.checkpoints.tensor_file import RawTensor, write_tensors
from distributed.errors import CheckpointError


def write(path: Path, pieces: dict[str, tuple[tuple[int, ...], numpy.ndarray]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [
        RawTensor(name, "F32", part.shape, lambda part=part: numpy.ascontiguousarray(part).tobytes())
        for name, (_, part) in pieces.items()
    ]
    write_tensors(path, tensors, sharding_metadata({name: start for name, (start, _) in pieces.items()}))


def as_array(data: memoryview, shape: tuple[int, ...]) -> numpy.ndarray:
    return numpy.frombuffer(data, numpy.float32).reshape(shape)


WHOLE = numpy.arange(7 * 5, dtype=numpy.float32).reshape(7, 5)


def cut(directory: Path, rows: tuple[int, ...], columns: tuple[int, ...]) -> None:
    boxes = itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    for number, ((top, bottom), (left, right)) in enumerate(boxes):
        write(directory / f"shard-{number}.safetensors", {"w": ((top, left), WHOLE[top:bottom, left:right])})


@pytest.mark.parametrize("rows", [(0, 7), (0, 4, 7), (0, 1, 2, 7), (0, 3, 3, 7)])
@pytest.mark.parametrize("columns", [(0, 5), (0, 2, 5)])
def test_every_part_is_read_from_any_cut(tmp_path: Path, rows: tuple[int, ...], columns: tuple[int, ...]) -> None:
    cut(tmp_path, rows, columns)
    tensors, _ = read_tensors(tmp_path)
    stored = tensors["w"]
    assert stored.shape == (7, 5)
    numpy.testing.assert_array_equal(as_array(stored.read(), (7, 5)), WHOLE)
    for top, left in itertools.product(range(7), range(5)):
        for height, width in itertools.product(range(1, 8 - top), range(1, 6 - left)):
            part = as_array(stored.read(((top, left), (height, width))), (height, width))
            numpy.testing.assert_array_equal(part, WHOLE[top : top + height, left : left + width])


def test_a_part_without_elements_and_a_scalar(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": ((0, 0), WHOLE), "s": ((), numpy.float32(3.5).reshape(()))})
    tensors, _ = read_tensors(tmp_path)
    assert bytes(tensors["w"].read(((7, 0), (0, 5)))) == b""
    assert as_array(tensors["s"].read(), ()) == 3.5


@pytest.mark.parametrize(
    "pieces",
    [
        [((0, 0), WHOLE[:3]), ((4, 0), WHOLE[4:])],  # a hole
        [((0, 0), WHOLE[:4]), ((3, 0), WHOLE[3:])],  # an overlap
        [((0, 0), WHOLE[:3]), ((0, 0), WHOLE[:3]), ((6, 0), WHOLE[6:])],  # both, of the right size in all
    ],
)
def test_pieces_that_do_not_fit_are_refused(
    tmp_path: Path, pieces: list[tuple[tuple[int, int], numpy.ndarray]]
) -> None:
    for number, piece in enumerate(pieces):
        write(tmp_path / f"{number}.safetensors", {"w": piece})
    with pytest.raises(CheckpointError, match="pieces of w do not form one tensor"):
        read_tensors(tmp_path)


def test_a_damaged_place_is_refused(tmp_path: Path) -> None:
    for bad in ("[1]", '{"w": {"saved_offsets": [-1, 0]}}', '{"w": 3}', "{"):
        write_tensors(
            tmp_path / "a.safetensors",
            [RawTensor("w", "F32", (7, 5), WHOLE.tobytes)],
            {"DCP_SHARDING_INFO": bad},
        )
        with pytest.raises(CheckpointError, match="damaged"):
            read_tensors(tmp_path)
        (tmp_path / "a.safetensors").unlink()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_and_this_package_read_each_others_pieces(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

    cut(tmp_path / "ours", (0, 4, 7), (0, 5))
    target = {"w": torch.zeros(7, 5)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    numpy.testing.assert_array_equal(target["w"].numpy(), WHOLE)

    writer = HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True)
    dcp.save({"w": torch.from_numpy(WHOLE)}, storage_writer=writer, no_dist=True)
    tensors, _ = read_tensors(tmp_path / "theirs")
    numpy.testing.assert_array_equal(as_array(tensors["w"].read(), (7, 5)), WHOLE)
