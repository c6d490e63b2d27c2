"""One rank of checkpoint.py: saves and loads one state in every way that is compared."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Session
from distributed.checkpoints.store import CheckpointStore
from distributed.state import TrainState

WRITE, READ, COPY = "raw write + fsync", "page-cache read", "memcpy"
SAVE, RESUME, ASYNC, DCP_ASYNC = "our save", "our resume", "our asynchronous save, blocked", "DCP async_save, blocked"
AGAIN = {base: f"{base}, again" for base in (WRITE, READ, COPY)}
# Contestant -> what it is compared with.
BASES = {
    WRITE: WRITE, AGAIN[WRITE]: WRITE, SAVE: WRITE, "torch.save + fsync": WRITE, "DCP save": WRITE,
    READ: READ, AGAIN[READ]: READ, RESUME: READ, "torch.load": READ,
    COPY: COPY, AGAIN[COPY]: COPY, ASYNC: COPY, DCP_ASYNC: COPY,
}  # fmt: skip
OURS = {SAVE, RESUME, ASYNC}
BLOCKED = {ASYNC, DCP_ASYNC}
EXTRA_LIMIT_MB = 64
_BLOCK_BYTES = 8 << 20
_PARTITION = "partition"


class Contest:
    """The state of one rank, and the actions that are compared. All ranks call each action."""

    def __init__(self, session: Session, megabytes: float, width: int, directory: Path) -> None:
        fits = session._fits
        assert fits is not None
        self.backend, self.context, self.directory = fits.backend, fits.context, directory
        layers = max(1, round(megabytes * 1e6 / (12 * width * (width + 1))))
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        data = DataLoader(TensorDataset(torch.randn(8, width), torch.randn(8, width)), batch_size=4)
        self.wrapped, self.optimizer, self.loader = session.prepare(
            self.model, lambda params: torch.optim.AdamW(params, foreach=True), data
        )
        # DCP saves in a thread, whose collectives need a group of their own.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._numbers = iter(range(1, sys.maxsize))
        self.made: list[Path] = []

    def begin(self) -> None:
        """Collect the state, which exists after one update."""
        self.state = dict(self._tensors())
        self.parts = [_local(tensor) for tensor in self.state.values()]
        self.is_on_gpu = self.parts[0].is_cuda
        self.has_partition = any(name.startswith(_PARTITION) for name in self.state)
        is_cut = self.has_partition or any(type(tensor).__name__ == "DTensor" for tensor in self.state.values())
        self.writes = is_cut or self.context.is_main_process
        self.kept = [torch.empty_like(part, device="cpu", pin_memory=self.is_on_gpu).copy_(part) for part in self.parts]
        # What is read goes into the memory of the device.
        self.loaded = [torch.empty_like(part) for part in self.parts] if self.is_on_gpu else self.kept
        self.num_bytes = sum(part.nbytes for part in self.parts)
        self._stored = self._raw_write()  # what `read` reads
        self._torch = self._torch_save()
        self._ours = self.directory / "ours"
        self._store(self._ours).save(TrainState(step=1), {}, None)
        self._kept = self._store(self.directory / "async")  # its memory is kept from one save to the next
        self.made.clear()

    def actions(self) -> dict[str, Callable[[], Any]]:
        """Return the contestants by name. DeepSpeed has no resume, because a state is loaded before its engine exists."""
        actions: dict[str, Callable[[], Any]] = {
            WRITE: self._raw_write, READ: self._read, COPY: self._copy, SAVE: self._save,
            "torch.save + fsync": self._torch_save, "DCP save": self._dcp_save, RESUME: self._resume, "torch.load": self._torch_load,
            ASYNC: self._save_async, DCP_ASYNC: self._dcp_async, AGAIN[WRITE]: self._raw_write, AGAIN[READ]: self._read, AGAIN[COPY]: self._copy,
        }  # fmt: skip
        if self.has_partition:
            del actions[RESUME]
        return actions

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = {id(parameter): name for name, parameter in self.wrapped.named_parameters()}
        for number, (parameter, slots) in enumerate(self.optimizer.state.items()):
            # DeepSpeed's optimizer has one parameter, which is this rank's part of all of them.
            name = names.get(id(parameter), f"{_PARTITION}-{self.context.rank}-{number}")
            yield name, parameter.detach()
            for slot in ("exp_avg", "exp_avg_sq"):
                yield f"{name}.{slot}", slots[slot]

    def _new(self) -> Path:
        self.made.append(self.directory / f"{next(self._numbers)}-{self.context.rank}")
        return self.made[-1]

    def _raw_write(self) -> Path:
        path = self._new()
        if self.writes:
            with path.open("wb", buffering=0) as file:
                for part in self._on_host():
                    view = memoryview(part.reshape(-1).view(torch.uint8).numpy())
                    for start in range(0, len(view), _BLOCK_BYTES):
                        file.write(view[start : start + _BLOCK_BYTES])
                os.fsync(file.fileno())
        return path

    def _read(self) -> None:
        path = self._stored if self.writes else self._stored.with_name(self._stored.name[:-1] + "0")
        with path.open("rb", buffering=0) as file:
            for part in self.kept:
                view = memoryview(part.reshape(-1).view(torch.uint8).numpy())
                while len(view):
                    view = view[file.readinto(view[:_BLOCK_BYTES]) :]
        if self.is_on_gpu:
            self._to_device(self.kept)

    def _copy(self) -> None:
        for kept, part in zip(self.kept, self.parts, strict=True):
            kept.copy_(part, non_blocking=True)
        self.synchronize()

    def _on_host(self) -> list[torch.Tensor]:
        if self.is_on_gpu:
            self._copy()
        return self.kept if self.is_on_gpu else self.parts

    def _to_device(self, tensors: list[torch.Tensor]) -> None:
        for loaded, tensor in zip(self.loaded, tensors, strict=True):
            loaded.copy_(tensor, non_blocking=True)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the GPU, if there is one, has done its work."""
        if self.is_on_gpu:
            torch.cuda.synchronize()

    def _store(self, directory: Path) -> CheckpointStore:
        return CheckpointStore(
            directory, self.backend, keep_latest_k=1, keep_best=False, monitor="", monitor_mode="min", context=self.context, on_event=_fail
        )  # fmt: skip

    def _save(self) -> None:
        path = self._new()
        path = path.with_name(path.name.split("-")[0])  # one for all ranks
        self.made.append(path)
        self._store(path).save(TrainState(step=1), {}, None)

    def _save_async(self) -> Callable[[], Any]:
        self._kept.save_in_background(TrainState(step=next(self._numbers)), {}, None, lambda: None)
        return self._kept.finish

    def _resume(self) -> None:
        store = self._store(self._ours)
        found = store.find()
        assert found is not None
        store.resume(found)

    def _torch_save(self) -> Path:
        path = self._new()
        if self.writes:
            with path.open("wb") as file:
                torch.save(dict(zip(self.state, self.parts, strict=True)), file)
                file.flush()
                os.fsync(file.fileno())
        return path

    def _torch_load(self) -> None:
        path = self._torch if self.writes else self._torch.with_name(self._torch.name[:-1] + "0")
        loaded = torch.load(path)
        self._to_device([loaded[name] for name in self.state])

    def _dcp_path(self) -> Path:
        path = self._new()
        self.made.append(path := path.with_name(f"dcp-{path.name.split('-')[0]}"))
        return path

    def _dcp_save(self) -> None:
        dcp.save(self.state, checkpoint_id=self._dcp_path(), no_dist=not dist.is_initialized())

    def _dcp_async(self) -> Callable[[], Any]:
        future = dcp.async_save(
            self.state, checkpoint_id=self._dcp_path(), process_group=self._group, no_dist=self._group is None
        )
        return future.result  # type: ignore[no-any-return, union-attr]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def _fail(event: Any) -> None:
    raise SystemExit(event.get("message", event))


def _memory(what: str) -> int:
    """Return a memory figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))


def turn(contest: Contest, action: Callable[[], Any]) -> dict[str, float]:
    """Run `action` on all ranks together. Return its seconds and the extra megabytes, each of the worst rank."""
    world = contest.backend.world
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    world.barrier()
    start = time.perf_counter()
    rest = action()
    contest.synchronize()
    world.barrier()
    seconds = time.perf_counter() - start
    if callable(rest):  # what goes on in the background
        rest()
    extra = (_memory("VmHWM") - before) / 1e6
    found = world.gather([seconds, extra])
    world.barrier()
    for path in contest.made:
        (shutil.rmtree if path.is_dir() else os.unlink)(
            path
        ) if contest.context.is_main_process and path.exists() else None
    world.barrier()
    for path in contest.made:
        path.unlink() if path.exists() else None
    contest.made.clear()
    return {"seconds": max(each[0] for each in found), "extra": max(each[1] for each in found)}


def main(backend: str, device: str, megabytes: float, width: int, rounds: int, out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with Session(backend=backend, device=device, verbose=False, checkpoint_frequency=None) as session:
        contest = Contest(session, megabytes, width, out.parent)
        for _ in session.epochs():
            for inputs, targets in contest.loader:
                session.backward(nn.functional.mse_loss(contest.wrapped(inputs), targets))
                session.update()
        contest.begin()
        gc.collect()
        gc.freeze()  # as the launcher does for the workers that it starts
        actions = contest.actions()
        names = list(actions)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in BASES if name in actions}
        for number in range(-1, rounds):  # the first round warms up
            random.Random(number).shuffle(names)  # the same order on all ranks
            for name in names:
                measured = turn(contest, actions[name])
                if number >= 0:
                    runs[name].append(measured)
        about = (
            f"{backend} on {device}: {contest.num_bytes / 1e6:.0f} MB on each of {contest.context.world_size} ranks,"
            f" {len(contest.parts)} tensors, {rounds} rounds"
        )
        if contest.context.is_main_process:
            out.write_text(json.dumps({"about": about, "runs": runs}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6]))
