"""Reads what a run wrote for TensorBoard, with TensorBoard's own reader and without TensorFlow."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))


def read(directory: Path) -> Any:
    """An EventAccumulator with all that lies in `directory`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = ("scalars", "tensors", "histograms", "compressedHistograms", "images", "audio")
    return EventAccumulator(str(directory), size_guidance=dict.fromkeys(kinds, 0)).Reload()


def steps(events: Any, tag: str) -> list[int]:
    return [event.step for event in events.Scalars(tag)]


def hyperparameters(events: Any) -> dict[str, Any]:
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = parse_session_start_info_plugin_data(content).hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def status(events: Any) -> int:
    """How the session ended, as hparams' api.proto counts: 1 in success, 2 in failure."""
    from tensorboard.plugins.hparams.metadata import parse_session_end_info_plugin_data

    content = events.summary_metadata["_hparams_/session_end_info"].plugin_data.content
    return int(parse_session_end_info_plugin_data(content).status)


def graph(events: Any) -> list[str]:
    """Names of the nodes."""
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    return [node.name for node in GraphDef.FromString(events.Graph().SerializeToString()).node]


def sessions(directory: Path) -> dict[str, tuple[dict[str, Any], dict[str, float]]]:
    """What the HParams tab shows of the runs below `directory`: (hyperparameters, last values of the tags) of each."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.backend_context import Context
    from tensorboard.plugins.hparams.list_session_groups import Handler

    events = EventMultiplexer().AddRunsFromDirectory(str(directory)).Reload()
    tab = Context(TBContext(data_provider=MultiplexerDataProvider(events, str(directory))))
    kinds = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
    asked = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=100, allowed_statuses=kinds)
    found = Handler(RequestContext(), tab, "", asked).run().session_groups
    return {
        group.name: (
            {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()},
            {str(each.name.tag): each.value for each in group.metric_values},
        )
        for group in found
    }
