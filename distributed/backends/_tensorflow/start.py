"""How a worker joins TensorFlow's cluster: before the script runs, because what TensorFlow holds by then would be lost.

A MultiWorkerMirroredStrategy renames the devices of its process. Models and data sets that were made before are then out of
reach ("unknown device"), so that a script that makes its model in its first lines could not train on several processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distributed.backends._tensorflow.scripts import refuse_torch_script
from distributed.config.registry import backend_row, import_library
from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.tf_config import TFCluster, read_tf_config
from distributed.launching.exposure import engine_warnings
from distributed.launching.listening import reachable_address
from distributed.launching.request import LaunchRequest
from distributed.launching.secret import messages

WORDS, FLAGS = "backend='tensorflow'", "--backend tensorflow"  # how it is set, and how workers that have it are started

_KEYS_OF_ONE = 100_000  # numbers of groups that a strategy may give, as TensorFlow's own tests keep them apart


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """This process in TensorFlow's cluster. `store` is shared by all workers, as torch.distributed's Store."""

    strategy: Any
    store: Any


class _ThisProcess:
    joined: Joined | None = None
    num_strategies = 0  # that the script has made since
    own_gpu: str | None = None  # what CUDA_VISIBLE_DEVICES was set to


def before_script(request: LaunchRequest, found: WorkerEnvironment, report: Callable[[dict[str, Any]], None]) -> None:
    """In a worker, before its script: the environment that TensorFlow reads when it is imported, and the cluster."""
    check_engine(WORDS, FLAGS)
    check_cluster()
    if request.script is not None and request.payload is None:
        refuse_torch_script(Path(request.script))
    set_environment(found, request.device)
    if found.world_size > 1:
        join(found, request.start_timeout, lambda text: report({"kind": "warning", "text": text}))
        _refuse_mirrored(found.world_size)
    import_seeded(request)


def import_seeded(request: LaunchRequest) -> None:
    """Import TensorFlow for a script, and seed it alike on every rank."""
    import_quietly()
    if request.device != "cpu":
        set_memory_growth()
    options = {**request.typed.file.get("tensorflow", {}), **request.typed.flag.get("tensorflow", {})}
    if request.device == "cpu" and options.get("num_devices") is not None:
        from distributed.backends._tensorflow.replicas import split_cpu

        split_cpu(options["num_devices"])
    _seed(int(request.typed.flag.get("seed", request.typed.file.get("seed", 0))))


def set_environment(found: WorkerEnvironment | None, device: str) -> None:
    """This worker's own GPU and share of the cores, which TensorFlow reads when it is imported."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", threads)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    elif found is not None and found.world_size > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = _own_gpu(found)


def _own_gpu(found: WorkerEnvironment) -> str:
    """The one that this worker drives, as CUDA_VISIBLE_DEVICES calls it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and visible == _ThisProcess.own_gpu:  # asked before
        return visible
    entries = [entry.strip() for entry in visible.split(",")] if visible else []
    if entries and found.local_rank >= len(entries):
        raise ResourceError(
            f"CUDA_VISIBLE_DEVICES={visible!r} names {len(entries)} GPU{'s' * (len(entries) > 1)}, and worker"
            f" {found.local_rank} of this machine needs one of its own: name {found.local_world_size} GPUs, or set"
            f" nproc_per_node={len(entries)}"
        )
    _ThisProcess.own_gpu = entries[found.local_rank] if entries else str(found.local_rank)
    return _ThisProcess.own_gpu


def set_memory_growth(*, first_only: bool = False) -> None:
    """GPUs give memory as it is needed, and not all of it at once; with `first_only` the others are left alone.

    Only before TensorFlow's first operation; TF_FORCE_GPU_ALLOW_GROWTH, which workers have and a user may set to false, holds
    at any time.
    """
    import tensorflow as tf

    with contextlib.suppress(RuntimeError, ValueError):  # it is in use already, or the script has divided a GPU
        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") != "false" else ():
            tf.config.experimental.set_memory_growth(gpu, True)
        if first_only and len(gpus) > 1:
            tf.config.set_visible_devices(gpus[:1], "GPU")


def join(found: WorkerEnvironment, start_timeout: float, warn: Callable[[str], None]) -> Joined:
    """The cluster of this process' workers, which it joins at the first call. Every worker must call it.

    ResourceError names the workers that did not come within `start_timeout` seconds; ConfigError where TensorFlow was used
    in this process before.
    """
    if _ThisProcess.joined is None:
        from distributed.backends._torch.meeting import meet

        _refuse_late()
        for text in engine_warnings(backend_row("tensorflow").listens) if found.rank == 0 else ():
            warn(text)
        store = meet(found, start_timeout, warn, "fit()")
        with _addresses(found, messages(store, "tensorflow")):
            _ThisProcess.joined = Joined(_strategy(), store)
        _share_cluster()
    return _ThisProcess.joined


@contextlib.contextmanager
def _addresses(found: WorkerEnvironment, store: Any) -> Iterator[None]:
    """Set TF_CONFIG to the workers' addresses, unless it is given. This worker's port is held until it is listened on:
    a bound socket that does not listen keeps others away, and lets in who asks for the very same port."""
    if found.source == "TF_CONFIG":
        yield
        return
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        store.set(f"address/{found.rank}", f"{_own_host(found)}:{held.getsockname()[1]}")
        workers = [store.get(f"address/{rank}").decode() for rank in range(found.world_size)]
        content = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": found.rank}}
        os.environ["TF_CONFIG"] = json.dumps(content)
        yield


def _own_host(found: WorkerEnvironment) -> str:
    """Return the address under which the others reach this machine, as it stands before a port."""
    is_alone = found.local_world_size == found.world_size
    address = reachable_address(None if is_alone else found.master_addr)
    return f"[{address}]" if ":" in address else address


def _strategy() -> Any:
    import_quietly()
    import tensorflow as tf

    with _own_sigterm():
        try:
            return tf.distribute.MultiWorkerMirroredStrategy()
        except (tf.errors.OpError, RuntimeError) as error:
            raise ResourceError(f"TensorFlow's workers did not find each other: {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does here: in a cluster TensorFlow notes it for its PreemptionWatcher, and nothing else comes of it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _share_cluster() -> None:
    """Let strategies that a script makes use the cluster that this process is in, each with collectives of its own.

    By itself TensorFlow would enable collectives anew for each of them. Worker 0 then forgets what the others have asked it
    until then, and those that were ahead of it wait for ever.
    """
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    begin, first_keys = CollectiveAllReduceExtended.__init__, itertools.count(_KEYS_OF_ONE, _KEYS_OF_ONE)

    def begin_in_cluster(self: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
        _ThisProcess.num_strategies += 1
        strategy._collective_key_base = next(first_keys)
        self._std_server_started = True
        self._enable_check_health = False  # TensorFlow's coordination service sees to it, as for the first one
        begin(self, strategy, *args, **kwargs)

    CollectiveAllReduceExtended.__init__ = begin_in_cluster


def is_used_by_script() -> bool:
    """Whether the script made the strategy of the cluster that this process is in, or one more of its own."""
    return _ThisProcess.joined is None or _ThisProcess.num_strategies > 0


def _refuse_mirrored(world_size: int) -> None:
    """Make MirroredStrategy say that it is for one process: in a cluster it kills its own."""
    import tensorflow as tf

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"tf.distribute.MirroredStrategy is for one process with several devices, and this run has {world_size}: start"
            " with --nproc-per-node 1, or use MultiWorkerMirroredStrategy or a Trainer"
        )

    tf.distribute.MirroredStrategy.__init__ = refuse


def _refuse_late() -> None:
    module = sys.modules.get("tensorflow.python.eager.context")
    if module is not None and getattr(module.context(), "_context_handle", None) is not None:
        raise ConfigError(
            "TensorFlow was used in this process before it could join the others: start with"
            " 'python -m distributed.cli train --backend tensorflow', or make model and data in functions"
        )


def import_quietly() -> None:
    """Import TensorFlow, whose C++ side greets on stderr whatever TF_CPP_MIN_LOG_LEVEL says."""
    if "tensorflow" in sys.modules:
        return quieten()
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        for module in ("tensorflow", "keras"):
            import_library("tensorflow", module)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
    return quieten()


def quieten() -> None:
    """Python's side of TensorFlow says only what is wrong."""
    import absl.logging
    import tensorflow as tf

    absl.logging.set_verbosity(absl.logging.ERROR)
    tf.get_logger().setLevel("ERROR")
    # Of a compiled model that came by value: its optimizer has made no update yet.
    warnings.filterwarnings("ignore", "Skipping variable loading for optimizer", UserWarning)


def _seed(seed: int) -> None:
    """Alike on every rank, as for other engines: the same model and the same order of a shuffled data set."""
    import keras

    state = random.getstate()
    keras.utils.set_random_seed(seed & 0xFFFFFFFF)
    random.setstate(state)  # the launcher has seeded it by the whole number


def check_engine(what: str, flags: str) -> None:
    """ConfigError where Keras has another engine; `what` needs TensorFlow, and workers started with `flags` have it."""
    keras = sys.modules.get("keras")
    engine = keras.config.backend() if keras is not None else os.environ.get("KERAS_BACKEND", "tensorflow")
    if engine != "tensorflow":
        raise ConfigError(
            f"{what} needs Keras on TensorFlow, and Keras is set to {engine!r}: set KERAS_BACKEND=tensorflow, or"
            f" leave it unset and start with {flags}"
        )


def check_cluster() -> None:
    """ConfigError where TF_CONFIG makes no sense."""
    text = os.environ.get("TF_CONFIG", "")
    if text and not isinstance(found := read_tf_config(text), TFCluster):
        raise ConfigError(f"TF_CONFIG={text[:60]!r}: {found}: correct it, or unset it to start workers here")
