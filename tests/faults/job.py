"""Train a small model on two processes, and inject the fault that the first argument names, on rank 1 in step 3 where it has a choice.

    python -m distributed.cli train --script tests/faults/job.py --nproc-per-node 2 --run-dir run --set hang_timeout=3 -- stop
    python -m distributed.cli why run

Several names, separated by `+`, are for one attempt of the workers each. `none` is no fault.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from distributed import Callback, Trainer

RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
FAULTS = (sys.argv[1] if len(sys.argv) > 1 else "none").split("+")
FAULT = dict(enumerate(FAULTS)).get(ATTEMPT, "none")
STEP = 3
WAITS_S = float(os.environ.get("FAULT_WAITS_S", "0"))  # seconds of each step, for faults that come from outside


def is_due(step: int, rank: int = 1) -> bool:
    """Return whether this rank is to fail in this step."""
    return rank == RANK and step == STEP


def loop_for_ever() -> None:
    while True:
        time.sleep(0.01)


class Samples(Dataset[Any]):
    """64 samples. Rank 1 reads sample 17 in step 3."""

    def __init__(self) -> None:
        self.x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if index == 17 and FAULT == "loop-data":
            loop_for_ever()
        if index == 17 and FAULT in ("bad-sample", "bad-sample-in-loader"):
            raise ValueError(f"sample {index} cannot be read")
        if index == 17 and FAULT in IN_LOADER:
            time.sleep(
                0.5
            )  # until the rank waits for this sample: the end of a process is reported wherever the rank is
            IN_LOADER[FAULT]()
        if index == 17 and FAULT == "nan":
            return self.x[index] * float("nan"), 0
        return self.x[index], index % 3


class Fault(Callback):
    """Fail in a hook."""

    def on_step_end(self, state: Any, result: Any) -> None:
        time.sleep(WAITS_S)
        if is_due(state.step) and FAULT in OF_RANK_1:
            OF_RANK_1[FAULT]()
        if is_due(state.step, 0) and FAULT == "raise-on-rank-0":
            raise RuntimeError("only rank 0 has this")
        if state.step == STEP and FAULT in OF_ALL:
            OF_ALL[FAULT]()
        if is_due(state.step, 0) and FAULT == "checkpoints-deleted":
            shutil.rmtree(self.context.run_dir / "checkpoints")

    def on_error(self, state: Any, error: BaseException) -> None:
        if FAULT == "device-assert":
            os.abort()  # as torch does when it destroys a tensor after the error of a kernel


def stop_and_go_on() -> None:
    """Stop for a second, as when a machine is suspended, and go on."""
    if os.fork() == 0:
        time.sleep(1.0)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.wait()


def mismatched_shapes() -> None:
    dist.all_reduce(torch.ones(4 if RANK else 8))


def other_order() -> None:
    """Call two collectives in another order on rank 1, as code under `if rank == 0` does."""
    gathered = [torch.zeros(4) for _ in range(2)]
    if RANK:
        dist.all_gather(gathered, torch.ones(4))  # the others call broadcast now
    dist.broadcast(torch.ones(1), 0)
    if not RANK:
        dist.all_gather(gathered, torch.ones(4))


def stays_away() -> None:
    """Call a collective on rank 0 only."""
    if RANK == 0:
        dist.barrier()


def clock_jumps() -> None:
    """Set the clock of this process back by a day, then forward by a week."""
    real, begun = time.time, time.time()
    time.time = lambda: real() + (-86400 if real() - begun < 0.5 else 7 * 86400)


def device_asserts() -> None:
    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


IN_LOADER = {
    "loader-killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "loader-stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop-loader": loop_for_ever,
}
OF_RANK_1 = {
    "device-assert": device_asserts,  # the host learns of it after the step
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stop-and-go-on": stop_and_go_on,
    "loop-callback": loop_for_ever,
    "exit-0": lambda: os._exit(0),
    "exit-3": lambda: os._exit(3),
    "sys-exit": lambda: sys.exit(4),
    "raise": lambda: int("no number"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
}
OF_ALL = {
    "shapes": mismatched_shapes,
    "order": other_order,
    "stays-away": stays_away,
    "clock": clock_jumps,
}


class Net(torch.nn.Module):
    """Count the steps of training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = torch.nn.Linear(6, 4 if FAULT == "other-model" else 3), 0


def training_step(model: Any, batch: Any) -> torch.Tensor:
    net = getattr(model, "module", model)
    net.steps += 1
    if is_due(net.steps) and FAULT == "loop-step":
        loop_for_ever()
    if is_due(net.steps) and FAULT == "memory":
        bytearray(1 << 60)
    if is_due(net.steps) and FAULT == "device-memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if RANK and FAULT == "device-assert" and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        device_asserts()  # in the first step of the second attempt
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def fill_disk() -> None:
    """Leave no space on the disk for the checkpoint of step 4, or for any if the fault says so."""
    import distributed.backends._torch.tensor_io as tensor_io

    writes = tensor_io.write_tensors

    def write(path: Path, *rest: Any) -> None:
        if "step-00000004" in str(path) or FAULT == "disk-stays-full":
            raise OSError(28, "No space left on device")
        writes(path, *rest)

    tensor_io.write_tensors = write


Net.forward = lambda self, x: self.layer(x)  # type: ignore[method-assign]

if __name__ == "__main__":
    if FAULT == "import":
        import a_module_that_nobody_has  # noqa: F401
    if FAULT in ("disk-full", "disk-stays-full"):
        fill_disk()
    settings: dict[str, Any] = {"gradient_clipping": -1} if FAULT == "setting" else {}
    in_loader = FAULT in (*IN_LOADER, "bad-sample-in-loader")
    data: Any = DataLoader(Samples(), batch_size=4, num_workers=1) if in_loader else Samples()
    trainer = Trainer(
        Net, training_step=training_step, callbacks=[Fault()], global_batch_size=8, shuffle=False if not in_loader else None,
        log_every_n_steps=1, checkpoint_every_n_steps=2, **settings,
    )  # fmt: skip
    trainer.fit(data)
