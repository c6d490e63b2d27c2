"""The registry of backends. A new backend is one file and one entry here.

An entry names code of `distributed.backends` as text. The package `backends` imports that code. In this module only `option_class`
imports some of it, so that settings can be checked.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from distributed.config.libraries import check_not_hidden, is_installed
from distributed.errors import ConfigError, ResourceError, nearest

# Worded as in docs/troubleshooting.md. A test compares them.
_ASSERTED = "CUDA error: device-side assert"
_TORCH_HINTS = {
    "DataLoader worker (pid": "A loader worker was killed, usually because memory ran out. Use fewer workers or a smaller prefetch_factor.",
    _ASSERTED: "Usually an index is out of range, such as a class label or a token.",
    "NCCL error": "Set NCCL_DEBUG=INFO in the environment of the command: NCCL then writes the reason to RUN/logs/rank-N.log.",
    "Too many open files": "Each tensor that a loader worker sends keeps a file open. Raise the limit (ulimit -n 65536).",
}


@dataclass(frozen=True)
class PeerErrors:
    """The errors that a library raises on a rank because another rank has ended. They are never the cause of a failure.

    They are recognized under every backend, because a script may use the library without a Trainer.
    """

    types: tuple[str, ...] = ()  # names of exceptions that are raised for no other reason
    general_types: tuple[str, ...] = ()  # names of exceptions that count if their message contains one of `messages`
    messages: tuple[str, ...] = ()  # parts of messages


@dataclass(frozen=True)
class BackendEntry:
    """Facts about a backend that the rest of the package can read without importing it."""

    name: str  # the value of `backend`
    module: str  # the module of its class
    class_name: str
    group: str  # the name of its option group in code and YAML
    preload: tuple[str, ...]  # modules the fork server imports once for all workers
    requires: tuple[str, ...]  # import names of the libraries that it needs
    install: str  # the exact command that installs them
    summary: str  # what it does, for help and documentation
    single_process: bool = False  # refuses more than one process
    fixed_size: str = ""  # why the number of processes cannot change during a run; "" if it can
    cpus_only: bool = False  # refuses GPUs, and trains on CPUs on a machine that has some
    is_default: bool = False  # used when no backend is set: for one process if `single_process`, else for several
    rendezvous: str | None = None  # "module:Class" of the rendezvous that our launcher opens for each attempt
    # "module:Class" of a `Starting` (see `distributed.backends.starting`), which checks and prepares a start of this backend.
    starting: str = "distributed.backends.starting:Starting"
    alone: str = "single"  # the backend for evaluating and predicting in one process
    # "module:function", called as `(LaunchRequest, WorkerEnvironment, on_event)` in each worker before the user's script.
    before_script: str = ""
    # "module:function" that our launcher calls with its LaunchRequest before it forks a worker, to import for all of them what
    # `preload` cannot name because it depends on the request.
    warm_up: str = ""
    # Whether `warm_up` may also run later, for the workers of a restart, if only the script has chosen this backend. This is
    # possible if the library reads no variable on import that only the workers have.
    warms_up_late: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)  # other spellings of its options, without the option group
    # Settings of other tools for this engine -> our counterpart, see `distributed.config.peers`.
    peers: Mapping[str, str] = field(default_factory=dict)
    # Argument of TrainingArguments that chooses this backend -> the option that gets its value, or "". ARGUMENT.KEY is an entry of
    # the dict of that name. See `distributed.config.training_arguments`.
    training_arguments: Mapping[str, str] = field(default_factory=dict)
    training_options: Mapping[str, str] = field(
        default_factory=dict
    )  # the same, of arguments that do not choose the backend
    for_launcher: tuple[str, ...] = ()  # options that the launcher reads. They also apply to scripts without a Trainer
    cuts_model: bool = False  # each process holds a part of each parameter, so that a larger model fits
    places_workers: bool = False  # it chooses the nodes of the workers, so one command starts those of all nodes
    shares_gpus: bool = False  # several processes may train on one GPU, over gloo
    compiled: str | None = None  # a module of its library that loads only with the torch that it was built for
    # A trainer that pins the backend `instead_of` runs on this backend if code sets one of the options `chosen_by` of this one.
    instead_of: str | None = None
    chosen_by: tuple[str, ...] = ()
    # Environment variables that its workers get before the script runs, unless the user has set them.
    environ: Mapping[str, str] = field(default_factory=dict)
    # Environment variables that the launcher gets with `profile` before it imports the engine, unless the user has set them.
    profile_environ: Mapping[str, str] = field(default_factory=dict)
    # Part of an error message of a script -> what it means, in one line.
    hints: Mapping[str, str] = field(default_factory=dict)
    # Part of a message with which a worker ended -> environment variables with which the next attempt shows the cause.
    retry_environ: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Parts of the messages of errors after which the library may abort the process while the error is being raised.
    aborts_after: tuple[str, ...] = ()
    slow_start: str = ""  # what takes long before the first output of its workers, for the line that announces them
    # "module:function" that returns whether a script joined other processes by this engine's own call. The function is
    # called even if the engine is not loaded. `joining_modules` are modules that a script imports only to join others.
    has_joined: str = ""
    joining_modules: tuple[str, ...] = ()
    seed: str = ""  # "module:function" that seeds the generators of the engine, which need not be loaded
    # "module:function" called in each worker before the script with the file that all workers share, or with None if they share
    # none. It makes the engine's own call in a script find the other workers. If the engine is installed, it is loaded.
    use_store: str = ""
    # "module:function" that returns the name of the engine's profiler if it records this process, else None. The engine need not
    # be loaded.
    active_profiler: str = ""
    # "module:function" that returns the data of a fit without what cannot be pickled. The engine need not be loaded.
    picklable: str = ""
    peer_errors: PeerErrors = PeerErrors()  # in one entry of each library
    # Parts of the paths of a library's files in which a rank waits for the others, in one entry of each library.
    waits_in: tuple[str, ...] = ()
    # The same of the files in which a rank waits for its loader processes, or a loader process for its rank.
    loads_in: tuple[str, ...] = ()
    listens: str = ""  # warning about ports that several workers open to other machines and cannot close

    @property
    def reinstall(self) -> str:
        """The command that repairs an installed but broken library."""
        return self.install.replace("pip install", "pip install --force-reinstall")


# Workaround (torch 2.13, no upstream issue known; torch._dynamo may go when AdamW and DDP do not import it on first use): this
# import takes a second per worker, so the fork server imports it once.
_TORCH_PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.data")
_TORCH_STARTING = "distributed.backends.starting:TorchStarting"
# Workaround (torch 2.13, no upstream issue known; may go when the profiler prints nothing by default): torch's profiler prints lines
# when it starts and stops. Torch reads the variable once, on import.
_TORCH_PROFILE = {"KINETO_LOG_LEVEL": "99"}
_KERAS_ON_TORCH = {"KERAS_BACKEND": "torch"}  # read when Keras is imported, which cannot change its engine afterwards
_TORCH_INSTALL = "pip install 'distributed-trainer[torch]'"
# Of torch (2.13), and of gloo and NCCL below it.
_TORCH_PEER_ERRORS = PeerErrors(
    types=("DistNetworkError", "DistStoreError"), general_types=("DistBackendError", "DistError"),
    messages=(
        "Connection closed by peer", "Connection reset", "Connection refused", "Broken pipe", "Socket Timeout",
        "recvValue failed", "sendBytes failed", "recvBytes failed", "failed to recv", "timed out after",
        "Timed out waiting", "wait timeout", "connectFullMesh failed", "remote process exited",
        "NCCL communicator was aborted", "unhandled system error",
    ),
)  # fmt: skip
# Messages of torch 2.13 for a float32 model with float64 data, by kind of layer or loss.
_DOUBLE_DATA = (
    "but got Double and Float", "but got: double != float", "Input type (double) and", "Found dtype Double but expected Float",
    "input dtype (torch.float64) does not match weight dtype (torch.float32)",
)  # fmt: skip
_DOUBLE_HINT = (
    "the data is float64, NumPy's default, and the model is float32: convert the data with .float() or .astype('float32'), or let"
    " the Trainer train in float64 with dtype='float64'"
)

REGISTRY: dict[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        BackendEntry(
            "single", "distributed.backends.single", "SingleBackend", "single", _TORCH_PRELOAD, ("torch",), _TORCH_INSTALL,
            "one process, no communication", single_process=True, is_default=True, environ=_KERAS_ON_TORCH,
            profile_environ=_TORCH_PROFILE, hints={**dict.fromkeys(_DOUBLE_DATA, _DOUBLE_HINT), **_TORCH_HINTS},
            retry_environ={_ASSERTED: {"CUDA_LAUNCH_BLOCKING": "1"}}, aborts_after=("CUDA error",),
        ),
        BackendEntry(
            "pytorch-ddp", "distributed.backends.ddp", "DDPBackend", "ddp", _TORCH_PRELOAD, ("torch",), _TORCH_INSTALL,
            "PyTorch DistributedDataParallel: a full copy of the model in every process", is_default=True,
            environ=_KERAS_ON_TORCH,
            aliases={
                "find_unused_parameters": "find_unused_parameters", "bucket_cap_mb": "bucket_cap_mb",
                "bucket_size_mb": "bucket_cap_mb", "static_graph": "static_graph",
            },
            peers={
                "ddp_find_unused_parameters": "use {ddp.find_unused_parameters}",
                "ddp_bucket_cap_mb": "use {ddp.bucket_cap_mb}", "ddp_comm_hook": "use {ddp.comm_hook}",
                "ddp_timeout": "use {timeout_s}", "ddp_backend": "use {communication_backend}",
                "ddp_broadcast_buffers": "because this is always done: drop it",
            },
            starting=_TORCH_STARTING, profile_environ=_TORCH_PROFILE, shares_gpus=True,
            has_joined="distributed.backends._torch.joined:has_joined", seed="distributed.backends._torch.seeding:seed",
            use_store="distributed.backends._torch.worker_store:use",
            active_profiler="distributed.backends._torch.caller:active_profiler",
            picklable="distributed.backends._torch.caller:picklable", peer_errors=_TORCH_PEER_ERRORS,
            waits_in=("/torch/distributed/", "/torch/autograd/graph.py"),  # DDP waits in the backward pass
            loads_in=("/torch/utils/data/dataloader.py", "/torch/utils/data/_utils/worker.py", "/torch/multiprocessing/"),
            training_options={
                f"ddp_{name}": name for name in ("find_unused_parameters", "bucket_cap_mb", "static_graph")
            },
        ),
        BackendEntry(
            "fsdp", "distributed.backends.fsdp", "FSDPBackend", "fsdp",
            (*_TORCH_PRELOAD, "torch.distributed.fsdp"), ("torch",), _TORCH_INSTALL,
            "PyTorch FSDP2: parameters, gradients and optimizer state sharded across the processes", cuts_model=True,
            environ=_KERAS_ON_TORCH, starting=_TORCH_STARTING, profile_environ=_TORCH_PROFILE,
            training_arguments={
                "fsdp": "", "fsdp_config.transformer_layer_cls_to_wrap": "wrap_classes", "fsdp_config.min_num_params": "min_num_params",
                "fsdp_config.cpu_offload": "cpu_offload", "fsdp_config.reshard_after_forward": "reshard_after_forward",
            },
            peers={
                "fsdp_config": "use {backend=fsdp} with its options, such as {fsdp.wrap_classes}",
                "fsdp_plugin": "use {backend=fsdp} with its options, such as {fsdp.wrap_classes}",
                "fsdp_transformer_layer_cls_to_wrap": "use {fsdp.wrap_classes}",
                "fsdp_min_num_params": "use {fsdp.min_num_params}", "sharding_strategy": "use {fsdp.reshard_after_forward}",
            },
        ),
        BackendEntry(
            "ray", "distributed.backends.ray", "RayBackend", "ray", _TORCH_PRELOAD, ("torch", "ray"),
            "pip install 'distributed-trainer[ray]'",
            "Ray Train starts the processes on its own or an existing cluster; the step is that of DDP or FSDP2",
            environ=_KERAS_ON_TORCH,
            starting="distributed.backends._ray.starting:RayStarting", places_workers=True, for_launcher=("cpus_per_worker",),
            joining_modules=("ray",), slow_start="Ray itself starts first, which can take half a minute",
            peers={
                "resources_per_worker": "use {ray.cpus_per_worker}",
                "scaling_config": "use {nproc_per_node}, {num_gpus} and {ray.cpus_per_worker}",
                "run_config": "because each of its fields is a setting: use {keep_latest_k} or {max_restarts}",
            },
        ),
        BackendEntry(
            "deepspeed", "distributed.backends.deepspeed", "DeepSpeedBackend", "deepspeed", _TORCH_PRELOAD,
            ("torch", "deepspeed"), "pip install 'distributed-trainer[deepspeed]'",
            "DeepSpeed ZeRO: optimizer state, gradients and parameters sharded across the processes, by stage",
            environ=_KERAS_ON_TORCH, aliases={"zero_stage": "zero_stage", "deepspeed_config": "deepspeed_config"},
            training_arguments={"deepspeed": "deepspeed_config"},
            peers={"deepspeed_plugin": "use {deepspeed.zero_stage} or {deepspeed.deepspeed_config}"},
            starting=_TORCH_STARTING, profile_environ=_TORCH_PROFILE,
            instead_of="pytorch-ddp", chosen_by=("zero_stage", "deepspeed_config"),
            before_script="distributed.backends._deepspeed.loading:before_script",
            warm_up="distributed.backends._deepspeed.loading:warm_up", warms_up_late=True, waits_in=("/deepspeed/comm/",),
            slow_start="importing DeepSpeed takes some seconds",
        ),
        BackendEntry(
            "horovod", "distributed.backends.horovod", "HorovodBackend", "horovod", _TORCH_PRELOAD, ("torch", "horovod"),
            "'make horovod' (builds it for the installed torch)",
            "Horovod: a full copy of the model in every process, over Gloo or MPI",
            environ=_KERAS_ON_TORCH, starting="distributed.backends._horovod.starting:HorovodStarting", profile_environ=_TORCH_PROFILE,
            rendezvous="distributed.backends._horovod.rendezvous:Rendezvous", compiled="horovod.torch",
            joining_modules=("horovod.common.basics", "mpi4py.MPI"),
            peer_errors=PeerErrors(general_types=("HorovodInternalError",), messages=("Horovod has been shut down",)),
            waits_in=("/horovod/",),
            hints={
                "'Variable' object has no attribute 'ref'": "Horovod's BroadcastGlobalVariablesCallback does not work with Keras 3:"
                " train the model with distributed.Trainer and --backend horovod, or drop the callback and call"
                " model.set_weights([hvd.broadcast(each, 0).numpy() for each in model.get_weights()]) before model.fit"
            },
        ),
        BackendEntry(
            "tensorflow", "distributed.backends.tensorflow", "TensorFlowBackend", "tensorflow", (), ("torch", "tensorflow", "keras"),
            "pip install 'distributed-trainer[tensorflow]'",
            "Keras 3 models on TensorFlow: one process per device, or one process on all devices (mirrored)", alone="tensorflow",
            peers={"strategy": "use {backend}; TensorFlow's own strategy is {tensorflow.strategy}"},
            before_script="distributed.backends._tensorflow.start:before_script",
            warm_up="distributed.backends._tensorflow.start:warm_up",
            has_joined="distributed.backends._tensorflow.joined:has_joined",
            listens="TensorFlow's workers listen on all interfaces, and anyone who connects can run code as you",
            slow_start="importing TensorFlow can take half a minute",
            hints={
                "PerReplica": "Keras 3's model.fit does not work under MultiWorkerMirroredStrategy (keras issue 20585): train the model"
                " with distributed.Trainer and --backend tensorflow instead"
            },
            environ={"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
        ),
    )
}  # fmt: skip

# Backends of a later version. Their names are not treated as misspelt.
LATER = ("tensor-parallel", "pipeline")
TRANSPORTS = ("nccl", "gloo", "mpi")  # the values of `communication_backend`


def backend_entry(name: str) -> BackendEntry:
    """Return the registry entry of `name`.

    Raises ConfigError for an unknown name, with the nearest known one.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    if name in TRANSPORTS:
        raise ConfigError(
            f"backend={name!r} is a transport, not a backend: set communication_backend={name!r} (--communication-backend {name})"
        )
    if name in LATER:
        raise ConfigError(f"backend={name!r} is not in this version: choose one of {', '.join(REGISTRY)}")
    raise ConfigError(f"backend={name!r} is not known{nearest(name, REGISTRY)}: choose one of {', '.join(REGISTRY)}")


def installed_version(name: str) -> str | None:
    """Return the version of the distribution `name`, or of one that contains a module of that name (such as
    tensorflow-cpu). None if there is none. Imports neither."""
    import importlib.metadata  # takes 25 ms, and only a check of versions needs it

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    for distribution in importlib.metadata.packages_distributions().get(name, ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return name -> installed version, or "missing", for a comparison between nodes. Imports none of them."""
    return {name: installed_version(name) or "missing" for name in names}


def missing_libraries(entry: BackendEntry) -> tuple[str, ...]:
    """Return the libraries that the backend needs and this environment lacks. Imports nothing."""
    return tuple(name for name in entry.requires if not is_installed(name))


def require_installed(entry: BackendEntry) -> None:
    """Raise ResourceError if libraries of the backend are missing or hidden by a file of the user. Imports nothing.

    The message has the command that installs them, or the file to rename.
    """
    for name in entry.requires:
        check_not_hidden(name)
    missing = missing_libraries(entry)
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ResourceError(
            f"backend {entry.name!r} needs {' and '.join(missing)}, which {are} not installed: run {entry.install}"
        )


def import_library(backend: str, module: str) -> ModuleType:
    """Import a module of the backend's library and return it.

    Raises ResourceError if it is installed but fails to import, because it is broken or was built for another version
    of its dependencies.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken library may raise anything
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise ResourceError(
            f"backend {backend!r} needs {module}, which is installed but does not load ({reason}): run"
            f" {backend_entry(backend).reinstall}"
        ) from error


def hint_of(message: str) -> str | None:
    """Return the hint for the error `message` of a script from any entry of the registry, or None if there is none."""
    hints = ((word, hint) for entry in REGISTRY.values() for word, hint in entry.hints.items())
    return next((hint for word, hint in hints if word in message), None)


def retry_environ(message: str) -> dict[str, str]:
    """Return the environment variables with which another attempt says more about the error `message`, from any entry of the registry."""
    found = (pair for entry in REGISTRY.values() for pair in entry.retry_environ.items())
    return {name: value for word, environ in found if word in message for name, value in environ.items()}


def may_abort(message: str) -> bool:
    """Return whether a library may abort the process after an error with this message, by any entry of the registry."""
    return any(word in message for entry in REGISTRY.values() for word in entry.aborts_after)


def pinned_backend(name: str, code: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return (backend, option) of a trainer that pins the backend `name`.

    `option` is the option in `code` that selects another backend, or None if none does.
    """
    for entry in REGISTRY.values():
        given = [option for option in entry.chosen_by if option in (code.get(entry.group) or {})]
        if entry.instead_of == name and given:
            return entry.name, f"{entry.group}.{given[0]}"
    return name, None


def default_backend(world_size: int) -> str:
    """Return the backend of a run of `world_size` processes if none is set."""
    return next(
        entry.name for entry in REGISTRY.values() if entry.is_default and entry.single_process == (world_size == 1)
    )


def one_process_reason() -> str:
    """Return why a backend with `single_process` refuses several processes, and what to use instead."""
    return f"it runs one process: set backend={default_backend(2)!r}, or nproc_per_node=1 on one node"


def fixed_size_reason(name: str) -> str:
    """Return why the number of processes of the backend `name` cannot change during a run, or "" if it can."""
    entry = backend_entry(name)
    return one_process_reason() if entry.single_process else entry.fixed_size


def cpus_only_reason() -> str:
    """Return why a backend with `cpus_only` refuses GPUs, and what to do instead."""
    return "it trains on CPUs only: drop it, or choose another backend"


def option_class(group: str) -> type[Any]:
    """Return the `Options` class of the backend whose option group is `group`, to check them.

    The entry names it. Its module is imported, but not its engine.
    """
    (entry,) = (entry for entry in REGISTRY.values() if entry.group == group)
    options: type[Any] = pkgutil.resolve_name(f"{entry.module}:{entry.class_name}.Options")
    return options
