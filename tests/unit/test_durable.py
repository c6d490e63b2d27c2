"""Files that are written durably: the disk begins before a large file is complete."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import sys

import pytest

from distributed.checkpoints import durable

MB = 1 << 20


def chunks(total: int, seed: int) -> list[bytes]:
    chance, found = random.Random(seed), list[bytes]()
    while total:
        size = min(total, chance.choice([1, 1000, MB, 5 * MB, 33 * MB]))
        found.append(chance.randbytes(min(size, 1000)) * (size // 1000) or b"x" * size)
        total -= len(found[-1])
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_disk_begins_to_write_each_large_part_once(tmp_path, monkeypatch, seed):
    begun, fds = [(0, 0)], set()

    def begin(fd: int, start: int, num_bytes: int) -> None:
        assert os.fstat(fd).st_size == len(content)
        begun.append((start, start + num_bytes))
        fds.add(fd)

    monkeypatch.setattr(durable, "begin_writeback", begin)
    pieces = chunks(70 * MB, seed)
    content = b"".join(pieces)
    with durable.records_of_written() as written:
        durable.write_file(tmp_path / "file", pieces, len(content))
    assert (tmp_path / "file").read_bytes() == content
    assert written[tmp_path / "file"].bytes == len(content)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(begun))
    assert all(14 * MB <= end - start < 17 * MB and end % (2 * MB) == 0 for start, end in begun[1:])  # pages are whole
    assert len(content) - begun[-1][1] < 16 * MB and len(fds) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="sync_file_range is a system call of Linux")
def test_the_system_accepts_the_call(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * MB)
        file.flush()
        call = durable._sync_file_range()
        if call(file.fileno(), 0, MB, durable._SYNC_FILE_RANGE_WRITE) != 0:
            assert ctypes.get_errno() in (errno.ENOSYS, errno.EPERM)
            pytest.skip("this system refuses the call")
        assert call(file.fileno(), -1, MB, durable._SYNC_FILE_RANGE_WRITE) == -1  # the arguments arrive as they are


def test_a_system_without_the_call_writes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_sync_file_range", lambda: None)
    content = random.Random(0).randbytes(40 * MB)
    durable.write_file(tmp_path / "file", [content], len(content))
    assert (tmp_path / "file").read_bytes() == content
