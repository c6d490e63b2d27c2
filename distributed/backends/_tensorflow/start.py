"""Join TensorFlow's cluster. A worker joins before its script runs, because TensorFlow objects that exist before the
process joins become unusable.

Workaround (TensorFlow 2.21, no upstream issue known; may go when objects from before the strategy stay usable): a
MultiWorkerMirroredStrategy renames the devices of its process. Models and data sets that were made earlier then fail
with "unknown device". If a worker joined later, a script that makes its model in its first lines could not train on
several processes.
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
from distributed.config.registry import backend_entry, import_library
from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.tf_config import TFCluster, read_tf_config
from distributed.launching.exposure import engine_warnings
from distributed.launching.listening import reachable_address
from distributed.launching.request import LaunchRequest
from distributed.launching.secret import messages
from distributed.launching.variables import set_missing
from distributed.state import OnEvent

# the setting that selects this backend, and the flags that start its workers
WORDS, FLAGS = "backend='tensorflow'", "--backend tensorflow"

_KEYS_OF_ONE = 100_000  # distance between the collective keys of strategies, as in TensorFlow's tests


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """Hold the cluster that this process has joined. `store` is a torch.distributed Store that all workers share."""

    strategy: Any
    store: Any


class _ClusterState:
    joined: Joined | None = None
    num_strategies = 0  # strategies that the script has made since the process joined
    own_gpu: str | None = None  # value that `_own_gpu` chose for CUDA_VISIBLE_DEVICES


def before_script(request: LaunchRequest, found: WorkerEnvironment, on_event: OnEvent) -> None:
    """Prepare a worker before its script runs: set the environment that TensorFlow reads at import, and join the
    cluster."""
    check_engine(WORDS, FLAGS)
    check_cluster()
    if request.script is not None and request.payload is None:
        refuse_torch_script(Path(request.script))
    set_environment(found, request.device)
    if found.world_size > 1:
        join(found, request.start_timeout, lambda text: on_event({"kind": "warning", "text": text}))
        _refuse_mirrored(found.world_size)
    import_seeded(request)


def warm_up(request: LaunchRequest) -> None:
    """Import TensorFlow in the launcher, once for all workers on CPUs. On GPUs each worker imports it itself: the
    import may use the GPU, and a process that is forked afterwards could not use the GPU."""
    if request.device != "cpu":
        return
    set_missing(request.environ)
    with contextlib.suppress(Exception):  # a worker gets the same error and reports it with its rank
        check_engine(WORDS, FLAGS)
        if request.script is not None and request.payload is None:
            refuse_torch_script(Path(request.script))
        set_environment(None, request.device)
        import_quietly()


def import_seeded(request: LaunchRequest) -> None:
    """Import TensorFlow for a script, and seed it with the same number on every rank."""
    import_quietly()
    if request.device != "cpu":
        set_memory_growth()
    num_devices = request.overrides.value("tensorflow", {}).get("num_devices")
    if request.device == "cpu" and num_devices is not None:
        from distributed.backends._tensorflow.replicas import split_cpu

        split_cpu(num_devices)
    _seed(int(request.overrides.value("seed", 0)))


def set_environment(found: WorkerEnvironment | None, device: str) -> None:
    """Set this worker's own GPU and number of threads, which TensorFlow reads at import."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", threads)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    elif found is not None and found.world_size > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = _own_gpu(found)


def _own_gpu(found: WorkerEnvironment) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which this worker sees only its own GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and visible == _ClusterState.own_gpu:  # set by an earlier call
        return visible
    entries = [entry.strip() for entry in visible.split(",")] if visible else []
    if entries and found.local_rank >= len(entries):
        raise ResourceError(
            f"CUDA_VISIBLE_DEVICES={visible!r} names {len(entries)} GPU{'s' * (len(entries) > 1)}, and worker"
            f" {found.local_rank} of this machine needs one of its own: name {found.local_world_size} GPUs, or set"
            f" nproc_per_node={len(entries)}"
        )
    _ClusterState.own_gpu = entries[found.local_rank] if entries else str(found.local_rank)
    return _ClusterState.own_gpu


def set_memory_growth(*, first_only: bool = False) -> None:
    """Let TensorFlow allocate GPU memory as needed. With `first_only`, hide all GPUs but the first.

    The call has an effect only before TensorFlow's first operation. In workers
    TF_FORCE_GPU_ALLOW_GROWTH is true unless the user set it to false, and the variable works at any time.
    """
    import tensorflow as tf

    with contextlib.suppress(RuntimeError, ValueError):  # TensorFlow is in use already, or the script has split a GPU
        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus if os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") != "false" else ():
            tf.config.experimental.set_memory_growth(gpu, True)
        if first_only and len(gpus) > 1:
            tf.config.set_visible_devices(gpus[:1], "GPU")


def join(found: WorkerEnvironment, start_timeout: float, warn: Callable[[str], None]) -> Joined:
    """Join the cluster of the workers at the first call, and return it. A collective: every worker must call it.

    Raises:
        ResourceError: some workers did not join within `start_timeout` seconds. The message names them.
        ConfigError: TensorFlow was used in this process before the call.
    """
    if _ClusterState.joined is None:
        from distributed.backends._torch.rendezvous import rendezvous

        _refuse_late()
        for text in engine_warnings(backend_entry("tensorflow").listens) if found.rank == 0 else ():
            warn(text)
        store = rendezvous(found, start_timeout, warn, "fit()")
        with _addresses(found, messages(store, "tensorflow")):
            _ClusterState.joined = Joined(_strategy(), store)
        _share_cluster()
    return _ClusterState.joined


@contextlib.contextmanager
def _addresses(found: WorkerEnvironment, store: Any) -> Iterator[None]:
    """Set TF_CONFIG to the addresses of the workers, unless the launcher or the user set it.

    This worker's port stays reserved by a bound socket that does not listen. Other programs then cannot be given the
    port, but TensorFlow's server can listen on it, because it uses SO_REUSEADDR.
    """
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
    """Return the address at which other workers reach this machine, with brackets if it is an IPv6 address."""
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
            why = str(error).splitlines()[0]
            if "Could not start gRPC server" in why:
                task = json.loads(os.environ["TF_CONFIG"])
                own = task["cluster"]["worker"][task["task"]["index"]]
                why += f": another program may use the port of {own}, which TF_CONFIG names for this worker"
            raise ResourceError(f"TensorFlow's workers did not find each other: {why}") from None


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM.

    Workaround (TensorFlow 2.21, no upstream issue known; may go when TensorFlow calls the handler that it found): in a
    cluster TensorFlow installs its own one for its PreemptionWatcher, which only records the signal.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _share_cluster() -> None:
    """Let each strategy that a script makes use the existing cluster, with collective keys of its own.

    Workaround (TensorFlow 2.21, no upstream issue known; may go when `CollectiveAllReduceExtended` does not restart the
    collectives): TensorFlow would enable collectives anew for each strategy. Worker 0 then forgets the requests of the
    others, and those that were ahead of it wait for ever.
    """
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    begin, first_keys = CollectiveAllReduceExtended.__init__, itertools.count(_KEYS_OF_ONE, _KEYS_OF_ONE)

    def begin_in_cluster(self: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
        _ClusterState.num_strategies += 1
        strategy._collective_key_base = next(first_keys)
        self._std_server_started = True
        self._enable_check_health = False  # the coordination service checks it, as for the first strategy
        begin(self, strategy, *args, **kwargs)

    CollectiveAllReduceExtended.__init__ = begin_in_cluster


def is_used_by_script() -> bool:
    """Return True if the script itself joined a cluster, or made a strategy after this package had joined one."""
    return _ClusterState.joined is None or _ClusterState.num_strategies > 0


def _refuse_mirrored(world_size: int) -> None:
    """Make MirroredStrategy raise ConfigError.

    Workaround (TensorFlow 2.21, no upstream issue known; may go when the strategy works in a cluster or raises an
    error): in a cluster it would kill its own process.
    """
    import tensorflow as tf

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"tf.distribute.MirroredStrategy is for one process with several devices, but this run has {world_size}: start"
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
    """Import TensorFlow without the lines that its C++ code prints on stderr.

    Workaround (TensorFlow 2.21, tensorflow/tensorflow#100442; may go when TF_CPP_MIN_LOG_LEVEL=3 silences the import):
    it prints them for every TF_CPP_MIN_LOG_LEVEL.
    """
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
    """Limit the Python logs of TensorFlow to errors."""
    import absl.logging
    import tensorflow as tf

    absl.logging.set_verbosity(absl.logging.ERROR)
    tf.get_logger().setLevel("ERROR")
    # Workaround (Keras 3.15, no upstream issue known; may go when Keras does not warn about such a model): Keras shows this warning
    # for a compiled model that was pickled before its optimizer made an update.
    warnings.filterwarnings("ignore", "Skipping variable loading for optimizer", UserWarning)


def _seed(seed: int) -> None:
    """Seed Keras with the same number on every rank, as other engines do. All ranks then make the same model and
    shuffle a data set in the same order."""
    import keras

    state = random.getstate()
    keras.utils.set_random_seed(seed & 0xFFFFFFFF)
    random.setstate(state)  # the launcher has seeded Python's generator with all bits


def check_engine(what: str, flags: str) -> None:
    """Raise ConfigError if Keras does not use TensorFlow. The message says that `what` needs TensorFlow and that
    `flags` select it."""
    keras = sys.modules.get("keras")
    engine = keras.config.backend() if keras is not None else os.environ.get("KERAS_BACKEND", "tensorflow")
    if engine != "tensorflow":
        raise ConfigError(
            f"{what} needs Keras on TensorFlow, but Keras is set to {engine!r}: set KERAS_BACKEND=tensorflow, or"
            f" leave it unset and start with {flags}"
        )


def check_cluster() -> None:
    """Raise ConfigError if TF_CONFIG is invalid."""
    text = os.environ.get("TF_CONFIG", "")
    if text and not isinstance(found := read_tf_config(text), TFCluster):
        raise ConfigError(f"TF_CONFIG={text[:60]!r}: {found}: correct it, or unset it to start workers here")
