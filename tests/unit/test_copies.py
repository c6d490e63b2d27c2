"""Ranks that do not share the directory of the checkpoints, and the parts in which files are sent to their nodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distributed.checkpoints import copies
from distributed.checkpoints.manifest import MANIFEST
from distributed.checkpoints.verifying import verify
from tests.unit.test_checkpoint import Rig, Threads, names, rig


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


@pytest.mark.parametrize("seed", range(20))
def test_each_rank_is_saved_and_loads_whatever_directories_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each rank of `rig` has all ranks on its node, as workers say that were started by hand, which may be wrong."""
    monkeypatch.setattr(copies, "_APPEARS_S", 0.0)
    draw = random.Random(seed)
    homes = [0, *(draw.randrange(4) for _ in range(draw.randint(1, 5)))]
    ranks = _on_homes(tmp_path, homes)
    assert _all(ranks, lambda one: one.store.is_shared()) == [not any(homes)] * len(homes)
    for step in (1, 2):
        _all(ranks, lambda one: one.save(step))  # noqa: B023
    _all(ranks, lambda one: one.store.close())
    own = {f"rng/rank-{rank}.safetensors" for rank in range(len(homes))}
    assert names(tmp_path / "home-0") == ["step-00000001", "step-00000002"]
    assert all(own < set(verify(path).files) for path in (tmp_path / "home-0").iterdir())

    again = _on_homes(tmp_path, homes)
    again[0].backend.weights = b"\0"
    _all(again, lambda one: one.store.resume(one.store.find()))
    assert {one.backend.loaded[0] for one in again} == {ranks[0].backend.weights}
    _all(again, lambda one: one.store.close())
    others = [path for home in {*homes} - {0} for path in (tmp_path / f"home-{home}").rglob("*")]
    assert [path for path in others if path.is_file()] == []


def test_a_checkpoint_from_elsewhere_is_sent_once_to_each_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "step-00000001").mkdir(parents=True)
    for name in ("a", MANIFEST):
        (tmp_path / "elsewhere" / "step-00000001" / name).write_bytes(b"weights")
    homes = [0, 0, 1, 2, 1]  # rank 1 shares the directory of the main process, but does not see the checkpoint
    ranks = _on_homes(tmp_path, homes)

    def read(one: Rig) -> tuple[str, bytes]:
        rank = one.store.context.rank
        with one.store._copies.here(tmp_path / ("nowhere" if rank else "elsewhere") / "step-00000001") as here:
            found = str(here.relative_to(tmp_path)), (here / "a").read_bytes()
            one.backend.world.threads.barrier.wait()  # a load ends on all ranks at once
        return found

    where = [f"home-{home}/.loading/step-00000001" for home in homes]
    assert _all(ranks, read) == [(path, b"weights") for path in ["elsewhere/step-00000001", *where[1:]]]
    nowhere = tmp_path / "nowhere" / "step-00000001"
    assert _all(ranks, lambda one: one.store._copies.away_from(nowhere)) == [[]] * 5  # not even the main process has it
    _all(ranks, lambda one: one.store.close())
    assert not [path for home in (0, 1, 2) for path in (tmp_path / f"home-{home}").iterdir()]


def test_a_disk_that_fails_while_the_ranks_look_costs_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, is_full = copies._create, [True]

    def create(directory: Path, name: str, end: str = "") -> str:
        if is_full and end == "-3":
            is_full.clear()
            raise OSError(28, "No space left on device")
        return real(directory, name, end)

    monkeypatch.setattr(copies, "_create", create)
    (tmp_path / "home-1").mkdir()
    (tmp_path / "home-1" / ".main-0-2").touch()  # of an attempt that was killed
    ranks = _on_homes(tmp_path, [0, 0, 1, 1])
    assert _all(ranks, lambda one: one.save(1)) == [None] * 4
    assert "No space left" in ranks[0].messages[0]
    _all(ranks, lambda one: one.save(2))
    _all(ranks, lambda one: one.store.close())
    assert names(tmp_path / "home-0") == ["step-00000002"] and names(tmp_path / "home-1") == []
    assert "rng/rank-3.safetensors" in verify(tmp_path / "home-0" / "step-00000002").files


def test_ranks_that_share_the_directory_send_nothing_and_leave_no_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies.Copies, "_send", lambda *args: pytest.fail("files were sent"))
    ranks = _on_homes(tmp_path, [0, 0, 0])
    _all(ranks, lambda one: one.save(1))
    assert names(tmp_path / "home-0") == ["step-00000001"]  # while the run goes on


def _on_homes(directory: Path, homes: list[int]) -> list[Rig]:
    """Return a store for each rank, in the directory of its home."""
    threads = Threads(len(homes))
    return [rig(directory / f"home-{home}", rank, threads) for rank, home in enumerate(homes)]


def _all(ranks: list[Rig], action: Callable[[Rig], Any]) -> list[Any]:
    """Run `action` on all ranks at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(action, ranks))
