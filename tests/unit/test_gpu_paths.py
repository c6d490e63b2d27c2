"""What is true of GPUs and can be shown without one."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import Trainer
from distributed.backends._torch import generators, world
from distributed.backends._torch.counted import ClassLoss, _by_zeros
from distributed.backends._torch.gradients import Gradients
from distributed.backends._torch.loading import shard
from distributed.backends._torch.nested import move
from distributed.backends._torch.objective import Loss
from distributed.backends._torch.passes import Passes
from distributed.backends._torch.precision import Precision
from distributed.backends._torch.update import Update
from distributed.backends.out_of_memory import out_of_memory
from distributed.backends.single import SingleBackend
from distributed.backends.torch_base import NoOptions
from distributed.config.data import DataOptions
from distributed.config.merging import Overrides, merge
from distributed.config.plan import BatchPlan, ProcessPlan, plan_processes
from distributed.config.settings import DistributedConfig
from distributed.errors import ResourceError, TrainingError
from distributed.state import DataRole, Job, StepResult, UpdateBatch, WorkerContext
from tests.unit.fake_gpu import HostWaits, fake_gpu

BATCH = BatchPlan(4, 1, 1, 4)


def test_the_fake_gpu_refuses_what_waits():
    with fake_gpu() as gpu:
        value = torch.ones(2, device=gpu)
        value.to("cpu", non_blocking=True)
        for wait in (lambda: value.sum().item(), lambda: value.to("cpu"), lambda: torch.tensor(1.0, device=gpu)):
            with pytest.raises(HostWaits):
                wait()


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.asynchronous = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.asynchronous.append((kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_outputs_are_whole_when_they_leave_the_device():
    with fake_gpu(may_wait=True) as gpu, Copies() as copies:
        outputs = {"scores": torch.ones(2, 3, device=gpu)}
        assert move(outputs, torch.device("cpu"), None)["scores"].device.type == "cpu"
        assert move(outputs, torch.device("cpu"), torch.float64)["scores"].dtype == torch.float64
        assert copies.asynchronous == [False, False]  # else torch gives page-locked memory that is still being filled
        copies.asynchronous.clear()
        move([torch.ones(2)], gpu, None)
        assert copies.asynchronous == [True]


@pytest.fixture
def other_gpu(monkeypatch):
    """A GPU is there, and nobody may touch it: the run is on CPUs."""

    def touched(*args, **kwargs):
        raise AssertionError("a run on CPUs used the GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", touched)


def test_a_run_on_cpus_leaves_the_gpu_alone(other_gpu, tmp_path):
    generators.save_rng(tmp_path, 0, torch.device("cpu"))
    assert generators.load_rng(tmp_path, 0, torch.device("cpu"))
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2, pin_memory=True)
    for dataset in (loader, torch.utils.data.DataLoader(list(torch.ones(4, 2)), batch_size=2, pin_memory=True)):
        cut = shard(
            dataset, batch=BatchPlan(2, 1, 1, 2), context=WorkerContext(0, 1, 0, 1, 0, "cpu"), config=DistributedConfig(),
            options=DataOptions(), role=DataRole.TRAINING, reduce=dict,
        )  # fmt: skip
        assert sum(group.num_samples for group in cut.epoch(0)) == 4


def test_generators_saved_on_a_cpu_are_not_taken_for_those_of_a_gpu(tmp_path):
    generators.save_rng(tmp_path, 0, torch.device("cpu"))
    before = torch.get_rng_state()
    torch.manual_seed(7)
    assert not generators.load_rng(
        tmp_path, 0, torch.device("cuda", 0)
    )  # the caller seeds them from seed, step and rank
    assert not torch.equal(torch.get_rng_state(), before)


def parameter(device, *shape):
    made = torch.nn.Parameter(torch.ones(shape, device=device))
    made.grad = torch.ones(shape, device=device)
    return made


def test_gradients_in_host_memory_are_rescaled_by_a_number_on_the_gpu():
    with fake_gpu(may_wait=True) as gpu:
        offloaded = [parameter("cpu", 2, 3), parameter("cpu", 3)]
        gradients = Gradients(offloaded, torch.nn.Module(), torch.device("cpu"))
        gradients.rescale(gradients.views(), torch.ones(1, dtype=torch.float64, device=gpu))


def test_a_weighted_class_loss_makes_nobody_wait():
    with fake_gpu() as gpu:
        loss = ClassLoss(torch.nn.functional.cross_entropy, weight=torch.ones(3, device=gpu), ignore_index=-1)
        count = loss._count(torch.zeros(4, dtype=torch.int64, device=gpu))
        assert count.is_cuda and count.dim() == 0


def test_the_weights_of_targets_that_count_are_summed_up_alike_on_a_gpu():
    weight, targets = torch.tensor([0.5, 2.0, 0.25]), torch.tensor([[0, 1, 2], [2, 1, -1]])
    counted = targets != -1
    assert _by_zeros(weight, targets, counted) == weight[targets[counted]].sum() == 5.0


# ------------------------------------------------------------------ a step


def prepared(**settings):
    """A backend of one process, for a net on the CPU."""
    merged = merge(Overrides(), {"epochs": 1, **settings})
    backend = SingleBackend(merged, NoOptions(), ProcessPlan(1, 1, "cpu", "single"))
    backend.setup()
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    backend.prepare(Job(net), BATCH)
    return backend


@pytest.mark.parametrize("clipping", [None, 1.0])
def test_what_follows_a_backward_pass_makes_nobody_wait(clipping):
    class Arrives:
        def record(self):
            pass

    backend = prepared(gradient_clipping=clipping)
    with fake_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Arrives)
        backend.device = gpu
        optimizer = torch.optim.AdamW([parameter(gpu, 2, 3), parameter(gpu, 3)])
        passes = Passes(backend, None)
        patch.setattr(backend, "passes", passes)
        update = Update(backend, optimizer, backend.update.schedule)
        loss = Loss(torch.ones((), device=gpu), None)
        passes.start_counting([Loss(loss.value, 4.0), Loss(loss.value, 2.0)])
        assert passes._total.is_cuda
        update.finish(UpdateBatch([], 4, 0), [loss], StepResult([]))
        assert update._unread is not None
        update._looks_later = False
        with pytest.raises(HostWaits):
            update.finish(UpdateBatch([], 4, 4), [loss], StepResult([]))


@pytest.mark.parametrize(
    ("settings", "may"),
    [({}, True), ({"nan_policy": "warn"}, True), ({"nan_policy": "skip"}, False), ({"mixed_precision": "fp16"}, False)],
)
def test_only_where_no_update_is_left_out_nobody_waits_to_know(settings, may):
    update = prepared(**settings).update
    assert not update._looks_later
    update._gradients.device = torch.device("cuda", 0)
    assert update._may_look_later() is may


class Spoilt(torch.utils.data.Dataset):
    """One sample is NaN."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((4,), float("nan") if index == self.bad else index / 48), index % 3


def steps(tmp_path, bad=None, looks_later=True, **settings):
    """(what training said, weights, names of checkpoints) of 12 updates."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    settings = {"nproc_per_node": 1, "device": "cpu", "batch_size": 4, "shuffle": False, "verbose": False, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Update, "_may_look_later", lambda self: looks_later)
        patch.chdir(tmp_path)
        trainer = Trainer(net, checkpoint_dir=str(tmp_path / "kept"), **settings)
        said = ""
        try:
            trainer.fit(Spoilt(bad))
        except TrainingError as error:
            said = str(error)
    names = sorted(path.name for path in tmp_path.rglob("step-*"))
    return said, [p.detach().clone() for p in net.parameters()], names


@pytest.mark.parametrize("settings", [{}, {"gradient_clipping": 0.01}, {"gradient_accumulation_steps": 2}])
def test_a_later_look_changes_no_bit(tmp_path, settings):
    _, late, _ = steps(tmp_path, **settings)
    _, at_once, _ = steps(tmp_path, looks_later=False, **settings)
    assert all(torch.equal(*both) for both in zip(late, at_once, strict=True))


@pytest.mark.parametrize("settings", [{}, {"gradient_clipping": 1.0}])
@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_a_nan_is_named_and_is_in_no_checkpoint(tmp_path, every, settings):
    said, _, names = steps(tmp_path, bad=22, checkpoint_every_n_steps=every, **settings)
    assert said.startswith(
        "step 6: the loss is nan on rank 0 for samples 20, 21, 22, 23 of the data set (samples at positions 20 to 23 of the"
        " epoch): stopped after"
    )
    assert all(int(name.removeprefix("step-")) < 6 for name in names) and bool(names) is (every < 6)


def test_a_nan_of_the_last_update_is_seen_too(tmp_path):
    said, _, names = steps(tmp_path, bad=47, checkpoint_every_n_steps=11)
    assert said.startswith("step 12: the loss is nan") and names == ["step-00000011"]


# ------------------------------------------------------------------ devices and transports


CUDA = ProcessPlan(1, 1, "cuda", "single")


def test_a_gpu_that_torch_cannot_use_is_said_in_one_line():
    with pytest.raises(
        ResourceError, match=r"torch \S+ cannot use \(.+\): install a torch for it, or add --device cpu"
    ):
        world.OneTorchProcess(CUDA)


def test_ranks_share_the_gpus_that_are_there(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [world.take_device(CUDA, rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert taken == [0, 1, 0]


SHARED = {"nproc_per_node": 2, "device": "cuda", "communication_backend": "gloo"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": None}, "shows 1: .* --device cuda --communication-backend gloo for processes that share a GPU"),
        ({"communication_backend": None}, "2 GPUs per node requested"),
        ({"communication_backend": "nccl"}, "2 GPUs per node requested"),
        ({"backend": "fsdp"}, "2 GPUs per node requested"),
        ({"num_gpus": 2}, "2 GPUs per node requested"),
    ],
)
def test_processes_share_a_gpu_only_where_that_is_asked_for(settings, said):
    with pytest.raises(ResourceError, match=said):
        plan_processes(DistributedConfig(**{**SHARED, **settings}), lambda: 1)


def test_two_processes_on_one_gpu_by_name():
    for settings in (SHARED, {**SHARED, "backend": "pytorch-ddp"}):
        assert plan_processes(DistributedConfig(**settings), lambda: 1) == ProcessPlan(1, 2, "cuda", "pytorch-ddp")
    with pytest.raises(ResourceError, match="shows no GPU"):
        plan_processes(DistributedConfig(**SHARED), lambda: 0)


@pytest.mark.parametrize(
    ("asked", "usual", "chosen"),
    [
        (None, None, "nccl"),
        ("gloo", None, "gloo"),
        (None, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),  # gradients in host memory have a transport all the same
        ("gloo", "cpu:gloo,cuda:nccl", "gloo"),
    ],
)
def test_transport(asked, usual, chosen):
    assert world._backends(CUDA, DistributedConfig(communication_backend=asked), usual) == chosen


def test_a_scale_for_gradients_in_host_memory_stays_there(monkeypatch):
    monkeypatch.setattr("torch.amp.grad_scaler.torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    precision = Precision("fp16", torch.device("cuda", 0), DistributedConfig(scaler_init_scale=8.0))
    precision.keep_scale_on(torch.device("cpu"))
    offloaded = torch.nn.Parameter(torch.zeros(2))
    offloaded.grad = torch.tensor([8.0, float("inf")])
    optimizer = torch.optim.SGD([offloaded], lr=1.0)
    precision.unscale(optimizer)
    assert offloaded.grad[0] == 1.0
    precision.updating(optimizer)()
    assert torch.equal(offloaded, torch.zeros(2)) and precision.scaler.get_scale() == 4.0
    assert precision.scaler._scale.device.type == "cpu"


# ------------------------------------------------------------------ memory


def test_too_little_memory_names_the_rank_and_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    def step(model, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has ...")
        return model(batch[0]).square().mean()

    settings = {"nproc_per_node": 1, "device": "cpu", "batch_size": 4, "verbose": False}
    trainer = Trainer(torch.nn.Linear(4, 1), training_step=step, activation_checkpointing=False, **settings)
    with pytest.raises(TrainingError) as caught:
        trainer.fit(Spoilt(None))
    said = str(caught.value)
    assert said.startswith(
        "rank 0 is out of memory in step 3: CUDA out of memory. Tried to allocate 20.00 MiB. To need less:"
    )
    for way in (
        "lower batch_size=4",
        "activation_checkpointing=true",
        "mixed_precision=bf16",
        "fsdp",
        "find_batch_size",
    ):
        assert way in said
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    (result,) = tmp_path.rglob("result.json")
    assert "rank 0 is out of memory in step 3" in json.loads(result.read_text())["error"]


def test_no_way_out_is_named_that_is_in_use():
    config = DistributedConfig(activation_checkpointing=True, mixed_precision="bf16")
    said = str(out_of_memory(MemoryError(), 1, 1, 1, config))
    assert "step 1: MemoryError. To need less: shard the model" in said
