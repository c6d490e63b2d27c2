"""Read and write safetensors files as raw bytes. Needs no framework and does not trust the header."""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from distributed.checkpoints import digests
from distributed.checkpoints.durable import memory_for, write_file
from distributed.checkpoints.part_checks import PartChecks, active_checks
from distributed.config.reading import MAX_HEADER_BYTES, MAX_HEADER_CONTAINERS, MAX_HEADER_TEXTS, num_containers
from distributed.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

# Name of an element type in numpy -> in safetensors.
WORDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip

_ALIGNMENT = 64  # bytes of a cache line: a copy to memory that begins elsewhere takes up to 1.3 times as long


class RawTensor(NamedTuple):
    """One named tensor. `read` returns its bytes, row-major and little-endian."""

    name: str
    dtype: str  # as safetensors names it: "F32", "BF16", ...
    shape: tuple[int, ...]
    read: Callable[[], bytes | memoryview]
    # Copies the bytes into memory of `num_bytes` bytes, if that costs less than to copy what `read` returns. A copy from a device may
    # still be running when it returns: the caller waits for it.
    copy_to: Callable[[memoryview], None] | None = None
    file: str = ""  # the name of the file that has the tensor, if it was read from one

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Writer = Callable[[Path, Iterator[bytes | memoryview], int], None]


def write_tensors(
    path: Path, tensors: Sequence[RawTensor], metadata: Mapping[str, str], writer: Writer = write_file
) -> None:
    """Write a safetensors file with `writer`. Only one tensor at a time is in memory.

    The default is to write durably and to create the directory, or to keep the file in memory (see `kept_in_memory`).
    Raises CheckpointError if there are too many tensors for one file, and OSError if `writer` does.
    """
    ordered = sorted(tensors, key=_place)
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.num_bytes
        content[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(content, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    if len(header) > MAX_HEADER_BYTES or _beyond(header):
        raise CheckpointError(f"{path.name} would hold {len(tensors)} tensors, more than one file can: shard the state")

    start = len(header).to_bytes(8, "little") + header
    if writer is write_file:
        if (memory := memory_for(path, [len(start), *(tensor.num_bytes for tensor in ordered)])) is not None:
            memory[: len(start)] = start
            copy_all(ordered, memory[len(start) :])
            return
        path.parent.mkdir(parents=True, exist_ok=True)

    def chunks() -> Iterator[bytes | memoryview]:
        yield start
        for tensor in ordered:
            yield tensor.read()

    writer(path, chunks(), len(start) + offset)


def _beyond(header: bytes) -> str:
    """Return the limit that a header exceeds, or "" if it exceeds none."""
    if num_containers(header) > MAX_HEADER_CONTAINERS:
        return f"{MAX_HEADER_CONTAINERS} lists and objects"
    return f"{MAX_HEADER_TEXTS} names and texts" if header.count(b'"') > 2 * MAX_HEADER_TEXTS else ""


def _place(tensor: RawTensor) -> tuple[bool, int, str]:
    """Return the sort key that keeps every tensor aligned to its elements, and as many as possible to `_ALIGNMENT`."""
    return tensor.num_bytes % _ALIGNMENT > 0, -ITEM_BYTES[tensor.dtype], tensor.name


def copy_all(tensors: Sequence[RawTensor], memory: memoryview) -> None:
    """Copy the bytes of `tensors` into `memory`, one after the other."""
    begin = 0
    for tensor in tensors:
        end = begin + tensor.num_bytes
        if tensor.copy_to is not None and end > begin:
            tensor.copy_to(memory[begin:end])
        else:
            memory[begin:end] = tensor.read()
        begin = end


def check_header(path: Path) -> int:
    """Return the length of the header in bytes.

    Raises CheckpointError if it is longer than the file or than `MAX_HEADER_BYTES`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        length = int.from_bytes(os.read(fd, 8), "little")
    finally:
        os.close(fd)
    if status.st_size < 8 or length > status.st_size - 8 or length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is not a safetensors file: its header claims {length} bytes,"
            f" the file has {status.st_size} and {MAX_HEADER_BYTES} are allowed"
        )
    return length


def read_raw(path: Path) -> tuple[list[RawTensor], dict[str, str]]:
    """Return (tensors, metadata) of a safetensors file. The tensors' bytes are memory-mapped, and `copy_to` of large ones reads the
    file.

    Raises CheckpointError if the file is not valid.
    """
    length = check_header(path)
    with path.open("rb") as file:
        header = file.read(8 + length)[8:]
        if limit := _beyond(header):
            raise CheckpointError(f"{path} has a header of more than {limit}")
        _validate(path)
        content = json.loads(header)
        del header
        # Workaround (torch 2.13, pytorch/pytorch#44027; may go when torch has read-only tensors): torch warns about read-only
        # buffers. ACCESS_COPY makes the pages private and writable.
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        source = _Source(path, data, 8 + length, os.fstat(file.fileno()), active_checks())
    metadata = content.pop("__metadata__", None) or {}
    # Each entry is freed as soon as it is converted, because the entries of 100,000 tensors take 60 MB.
    file_name = path.name
    return [_raw_tensor(name, content.pop(name), source, file_name) for name in list(content)], metadata


@dataclass(frozen=True, slots=True)
class _Source:
    """A file of tensors: its mapped memory, the position from which its header counts, its inode, and the checks of what is read."""

    path: Path
    mapped: memoryview
    start: int
    status: os.stat_result
    checks: PartChecks | None

    def part(self, begin: int, end: int) -> memoryview:
        """Return bytes of the mapped memory."""
        return self.mapped[begin:end]

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from the position `begin` on: from the file, or from the mapped memory if the file at the path
        is another one by now."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            memory[:] = self.part(begin, begin + len(memory))
            return
        try:
            with open(fd, "rb", buffering=0) as file:
                if not os.path.samestat(os.fstat(fd), self.status):
                    memory[:] = self.part(begin, begin + len(memory))
                    return
                self._fill(memory, file, begin)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None

    def _fill(self, memory: memoryview, file: Any, begin: int) -> None:
        """Fill `memory` from the open file. If the bytes are a part that is verified while it is read, note its digest."""
        part = None if self.checks is None else self.checks.part(self.path, begin, len(memory))
        digest, most = (None, len(memory)) if part is None else (xxhash.xxh3_128(), digests.BLOCK_BYTES)
        file.seek(begin)
        while len(memory):
            count = file.readinto(memory[:most])
            if not count:
                raise CheckpointError(f"{self.path} has become shorter while it was read")
            if digest is not None:
                digest.update(memory[:count])
            memory = memory[count:]
        if self.checks is not None and part is not None and digest is not None:
            self.checks.note(part, digest.hexdigest())


def _raw_tensor(name: str, entry: dict[str, list[int]], source: _Source, file: str) -> RawTensor:
    dtype = sys.intern(str(entry["dtype"]))
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{source.path}: {name} has the element type {dtype}, which this version does not know")
    first, last = entry["data_offsets"]
    begin, end = source.start + first, source.start + last
    # reading a large tensor from the file takes less time than a copy of its mapped memory
    copy_to = functools.partial(source.read_into, begin) if end - begin >= digests.LARGE_BYTES else None
    return RawTensor(name, dtype, tuple(entry["shape"]), functools.partial(source.part, begin, end), copy_to, file)


def _validate(path: Path) -> None:
    """Check offsets, shapes and names with the safetensors library, in Rust, before Python creates any object."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None
