"""Parameters are cut along the data axis, and those that cannot be cut are named before anything is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed.backends._torch.fully_sharded import check_units, shard
from distributed.backends._torch.modules import build_model, check_can_be_cut
from distributed.backends.fsdp import FSDPOptions
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError


def model(parameter: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(2, 3))
    made.temperature = torch.nn.Parameter(parameter)
    return made


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (torch.tensor(1.0), "temperature is a single number without a dimension, which fully_shard cannot shard"),
        (torch.ones(2, 3).t(), "temperature is not contiguous in memory, so fully_shard cannot shard it"),
    ],
)
def test_a_parameter_that_cannot_be_cut_is_named(parameter, said):
    with pytest.raises(ConfigError, match=said):
        check_can_be_cut(model(parameter), "fully_shard")


def test_sparse_gradients_are_refused_where_they_would_be_cut():
    table = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True))
    with pytest.raises(
        ConfigError, match=r"0.weight gets sparse gradients, which DeepSpeed cannot shard: .* sparse=False"
    ):
        check_can_be_cut(table, "DeepSpeed")
    check_can_be_cut(table, "DeepSpeed", allows_sparse=True)


def test_others_pass():
    check_can_be_cut(model(torch.ones(1)), "fully_shard")


def test_parameters_that_are_cut_together_have_one_type():
    made = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1).bfloat16())
    made.frozen = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    check_units(made, [made[1], made])  # the second layer on its own
    with pytest.raises(ConfigError, match=r"1.weight is torch.bfloat16 and 0.weight is torch.float32"):
        check_units(made, [made])


def test_a_lazy_layer_is_named_before_anything_is_wrapped():
    lazy = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LazyLinear(1))
    with pytest.raises(
        ConfigError, match=r"1.weight has no shape before the model has seen a batch: call the model on a batch once"
    ):
        build_model(lambda: lazy, DistributedConfig(), torch.device("cpu"))
    lazy(torch.zeros(1, 2))
    assert build_model(lambda: lazy, DistributedConfig(), torch.device("cpu")) is lazy


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Rank 0 of four. Its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("axes", "rows"), [({"data": 4}, 3), ({"data": 2, "tensor": 2}, 6), ({"tensor": 2, "data": 2}, 6)]
)
def test_parameters_are_cut_along_the_data_axis(axes, rows, four_ranks):
    made = torch.nn.Linear(2, 12)
    shard(made, FSDPOptions(), torch.device("cpu"), "no", axes)
    assert made.weight.device_mesh.mesh_dim_names == ("data",)
    assert made.weight.to_local().shape == (rows, 2) and made.weight.shape == (12, 2)
