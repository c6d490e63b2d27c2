"""Shard a model with FSDP2: choose the modules to shard, give all ranks equal weights and handle sharded gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from distributed.backends._torch import modules
from distributed.backends._torch.gradients import Gradients
from distributed.backends._torch.sharding import local, take_part, whole
from distributed.config.plan import DATA
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, nearest

if TYPE_CHECKING:
    from distributed.backends._torch.collective_timer import CollectiveTimer
    from distributed.backends.fsdp import FSDPOptions


def is_sharded_model(model: torch.nn.Module) -> bool:
    """Return whether `shard` was applied to the model."""
    return isinstance(model, FSDPModule)


def build(model_or_factory: Any, config: DistributedConfig, device: torch.device, *, is_main: bool) -> torch.nn.Module:
    """Return the user's model on the CPU.

    If a factory builds it, only the main process allocates memory. `shard` sends the values to the other ranks.
    """
    # Workaround (Keras 3.15, no upstream issue known; may go when Keras can build models on the meta device): if Keras is
    # imported, every rank builds the model with its values.
    if isinstance(model_or_factory, torch.nn.Module) or is_main or "keras" in sys.modules:
        return modules.build_model(model_or_factory, config, device)
    with torch.device("meta"):
        model = modules.build_model(model_or_factory, config, device)
    if _has_hidden_meta(model):
        return modules.build_model(model_or_factory, config, device)
    return model


def compile_forwards(model: torch.nn.Module) -> None:
    """Let torch compile what each separately sharded module does between its hooks.

    Workaround (torch 2.13, pytorch/pytorch#181924; may go when torch.compile traces the hooks of fully_shard):
    torch.compile of the whole model stops at the hooks of the first such module and compiles nothing of a Sequential.
    """
    codes: dict[Any, CodeType] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.forward = _compiled(module.forward, codes, (type(module), module is model))


def _compiled(forward: Callable[..., Any], codes: dict[Any, CodeType], kind: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo skips frames of torch.nn, see `compile_calls`
        return forward(*args, **kwargs)

    # Dynamo caches compiled code, and failures to compile, by code object. Equal blocks therefore share a code object,
    # and different blocks have different ones.
    call.__code__ = codes.setdefault(kind, call.__code__.replace(co_name=f"call_{len(codes)}"))
    compiled: Callable[..., Any] = torch.compile(call)
    return compiled


def _has_hidden_meta(model: torch.nn.Module) -> bool:
    """Return whether the module holds a meta tensor that is neither a parameter nor a buffer. `shard` would not fill
    it."""
    return any(isinstance(v, torch.Tensor) and v.is_meta for module in model.modules() for v in vars(module).values())


def shard(
    model: torch.nn.Module,
    options: FSDPOptions,
    device: torch.device,
    mixed_precision: str,
    axes: Mapping[str, int],
) -> None:
    """Shard the model in place, bottom up, and give every rank its part of the main process's weights. All ranks must
    call it.

    `axes` are those of the `ProcessPlan`. Parameters are sharded along the data axis.
    """
    modules.check_can_be_cut(model, "fully_shard")
    blocks = _blocks(model, options)
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    arguments = _arguments(options, device, mixed_precision, axes)
    norms = _with_statistics(model) if mixed_precision != "no" else []
    check_units(model, [*norms, *blocks, model])
    for norm in norms:
        fully_shard(norm, **{**arguments, "mp_policy": MixedPrecisionPolicy()})
    for block in blocks:
        if block not in norms:
            fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    home = torch.device("cpu") if options.cpu_offload else device
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        model.to_empty(device=home)
    _move_buffers(model, home)  # torch loads weights only into tensors of one device
    _take_weights(model, weights, device)
    _move_buffers(model, device)  # only parameters are offloaded
    for buffer in model.buffers():  # also buffers that are not in state_dict
        dist.broadcast(buffer, src=0)


def measure_collectives(model: torch.nn.Module, timer: CollectiveTimer) -> None:
    """Let `timer` run the collectives that exchange the parameters and gradients of a sharded model. It changes no result."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_MeasuredAllGather(timer))
            module.set_custom_reduce_scatter(_MeasuredReduceScatter(timer))


class _MeasuredAllGather(DefaultAllGather):
    def __init__(self, timer: CollectiveTimer) -> None:
        self._timer = timer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._timer.run(super().__call__, *args, **kwargs)


class _MeasuredReduceScatter(DefaultReduceScatter):
    def __init__(self, timer: CollectiveTimer) -> None:
        self._timer = timer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._timer.run(super().__call__, *args, **kwargs)


@torch.no_grad()
def _take_weights(model: torch.nn.Module, weights: Mapping[str, Any], device: torch.device) -> None:
    """Give every rank its part of the main process's `weights`. All ranks must call it.

    Workaround (torch 2.13, no upstream issue known; may go when torch's `set_model_state_dict` sends no pickle): with
    `broadcast_from_rank0=True` it sends a pickle before the tensors.
    """
    for name, own in model.state_dict().items():  # the names and their order are the same on every rank
        if isinstance(own, torch.Tensor):
            if dist.get_rank() == 0:
                full = weights[name].detach().to(device).contiguous()
            else:
                full = torch.empty(own.shape, dtype=own.dtype, device=device)
            dist.broadcast(full, src=0)
            take_part(own, full)


def check_units(model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
    """Raise ConfigError if the trainable parameters of a unit have different element types.

    `units` lists children before parents. Workaround (torch 2.13, pytorch/pytorch#156784; may go when fully_shard accepts such
    parameters): it would raise in the first forward, without naming a parameter.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken: set[torch.nn.Parameter] = set()
    for unit in units:
        own = [p for p in unit.parameters() if p not in taken and p.requires_grad]
        taken.update(own)
        for parameter in own:
            if parameter.dtype != own[0].dtype:
                raise ConfigError(
                    f"{names[parameter]} is {parameter.dtype} and {names[own[0]]} is {own[0].dtype}, but parameters that"
                    " fully_shard shards together need one element type: build the model in one, or use backend='pytorch-ddp'"
                )


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    moved: dict[torch.Tensor, torch.Tensor] = {}  # a buffer with two names stays one tensor
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if buffer.device != device:
            owner, _, last = name.rpartition(".")
            if buffer not in moved:
                moved[buffer] = buffer.to(device)
            model.get_submodule(owner)._buffers[last] = moved[buffer]


def _arguments(
    options: FSDPOptions, device: torch.device, mixed_precision: str, axes: Mapping[str, int]
) -> dict[str, Any]:
    """Return the arguments of `fully_shard`. Creates the device mesh, which is a collective."""
    reduced = torch.bfloat16 if options.reduce_dtype == "bfloat16" else torch.float32
    kinds = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    policy = MixedPrecisionPolicy()
    if mixed_precision != "no":
        policy = MixedPrecisionPolicy(param_dtype=kinds[mixed_precision], reduce_dtype=reduced)
    offload: OffloadPolicy = OffloadPolicy()
    if options.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    mesh = dist.init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return {
        "mp_policy": policy,
        "offload_policy": offload,
        "reshard_after_forward": options.reshard_after_forward,
        "mesh": mesh[DATA],
    }


def _blocks(model: torch.nn.Module, options: FSDPOptions) -> list[torch.nn.Module]:
    """Return the submodules to shard separately, children before parents."""
    below = [module for module in reversed(list(model.modules())) if module is not model]
    if options.wrap_classes:
        found = {type(module).__name__ for module in below}
        names = [name.strip() for name in options.wrap_classes.split(",")]
        for name in names:
            if name not in found:
                raise ConfigError(f"fsdp.wrap_classes: the model has no module of class {name!r}{nearest(name, found)}")
        chosen = [module for module in below if type(module).__name__ in names]
    elif options.min_num_params is not None:
        chosen = _by_size(below, options.min_num_params)
    else:
        repeated = modules.repeated_blocks(model)
        chosen = [module for module in below if any(module is block for block in repeated)]
    return [module for module in chosen if _is_callable_alone(module) and not _shares(module, model)]


def _with_statistics(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the BatchNorm-like submodules, which are sharded without mixed precision.

    Their statistics stay fp32, and so must their weights, as under autocast. Workaround (torch 2.13, pytorch/torchtitan#674; may go
    when fully_shard leaves BatchNorm in fp32): with 16-bit weights the CPU kernels fail, and other kernels lose precision.
    """
    kinds = torch.nn.modules.batchnorm._NormBase
    norms = [module for module in model.modules() if isinstance(module, kinds) and module is not model]
    return [module for module in norms if any(True for _ in module.parameters()) and not _shares(module, model)]


def _by_size(below: list[torch.nn.Module], least: int) -> list[torch.nn.Module]:
    """Return each module with at least `least` parameters that do not belong to a chosen module below it."""
    chosen: list[torch.nn.Module] = []
    taken: set[torch.nn.Parameter] = set()
    for module in below:
        rest = [p for p in module.parameters() if p not in taken]
        if sum(p.numel() for p in rest) >= least:
            chosen.append(module)
            taken.update(rest)
    return chosen


def _is_callable_alone(module: torch.nn.Module) -> bool:
    """Return whether the module has a forward, whose hooks gather and free the parameters. A ModuleList has none."""
    return not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))


def _shares(module: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Return whether a parameter of `module` is also used outside of it.

    A tied weight must be gathered where both modules can use it.
    """
    inside = set(module.modules())
    own = set(module.parameters())
    return any(p in own for m in model.modules() if m not in inside for p in m._parameters.values() if p is not None)


def rebind(optimizer: Any, replaced: Mapping[torch.nn.Parameter, torch.nn.Parameter]) -> Any:
    """Return the user's optimizer, or those of several models, with the whole parameters replaced by the sharded ones.

    A factory is returned unchanged.
    """
    if isinstance(optimizer, Mapping):
        return {name: rebind(each, replaced) for name, each in optimizer.items()}
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if any(parameter in replaced for parameter in optimizer.state):
        raise ConfigError(
            "the optimizer has state of whole parameters, but fsdp shards them: pass a fresh one, or a factory:"
            " optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    return optimizer


class ShardedGradients(Gradients):
    """Handle sharded gradients.

    Each rank examines its part, and the ranks agree on the result. Every method is a collective.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], model: torch.nn.Module, device: torch.device) -> None:
        home = local(parameters[0]).device if parameters else device
        super().__init__(parameters, model, home)

    def views(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self._parameters if p.grad is not None]

    def are_finite(self, views: list[torch.Tensor]) -> bool:
        return self.non_finite(views).item() == 0.0

    def non_finite(self, views: list[torch.Tensor]) -> torch.Tensor:
        found = super().non_finite(views)
        dist.all_reduce(found)
        return found

    def clip(self, views: list[torch.Tensor], limit: float) -> torch.Tensor:
        return whole(torch.nn.utils.clip_grad_norm_(self._parameters, limit))

    def norm(self) -> float | None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return float(whole(torch.nn.utils.get_total_norm(gradients))) if gradients else None
