"""Recognise streams of the WebDataset library that refuse to be read by several processes."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from distributed.errors import ConfigError

_REFUSING = "single_node_only"  # the node splitter that a WebDataset has by default


def check_node_splitter(dataset: Any, name: str, world_size: int) -> None:
    """Raise ConfigError if `dataset` is a pipeline of the WebDataset library that only one process can read.

    The library itself raises an error at the first sample, which does not name `data.presharded`. `name` is the role of the data set.
    """
    if world_size > 1 and _refuses_several(dataset):
        raise ConfigError(
            f"{name}: a WebDataset without a nodesplitter refuses to be read by {world_size} processes: set"
            " nodesplitter=webdataset.split_by_node and data.presharded=true, and each process reads its own files; or set"
            " nodesplitter=None, and every process reads all files"
        )


def _refuses_several(dataset: Any) -> bool:
    if isinstance(dataset, DataLoader):  # inside a WebLoader
        return _refuses_several(dataset.dataset)
    if not any(each.__module__.partition(".")[0] == "webdataset" for each in type(dataset).__mro__):
        return False
    stages = getattr(dataset, "pipeline", [])
    return any(getattr(stage, "__name__", "") == _REFUSING or _refuses_several(stage) for stage in stages)
