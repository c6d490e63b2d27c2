"""The parts in which the files of a checkpoint are sent to other nodes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from distributed.checkpoints import copies


@pytest.mark.parametrize("seed", range(30))
def test_each_byte_of_each_file_is_sent_once_and_empty_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(copies, "_CHUNK_BYTES", draw.randint(1, 40))
    content = {f"d{number % 2}/f{number}": draw.randbytes(draw.choice([0, 1, 7, 40, 93])) for number in range(8)}
    for name, data in content.items():
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(data)
    chunks = list(copies._chunks({name: len(data) for name, data in content.items()}))
    assert all(chunk and sum(count for *_, count in chunk) <= copies._CHUNK_BYTES for chunk in chunks)
    assert len(chunks) <= 1 + sum(map(len, content.values())) // copies._CHUNK_BYTES + 1
    for chunk in chunks:
        data = [copies._part(tmp_path / "there" / name, *part) for name, *part in chunk]
        copies._add_all(tmp_path / "here", chunk, data)
    assert {name: (tmp_path / "here" / name).read_bytes() for name in content} == content
