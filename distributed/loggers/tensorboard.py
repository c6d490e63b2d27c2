"""Write scalars, hyperparameters, the model's graph and histograms for TensorBoard, from the main process.

This needs the package `tensorboard`, which is loaded when training begins. TensorFlow is not needed, with any engine.
"""

from __future__ import annotations

import csv
import io
import struct
import time
import wave
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.callbacks import Callback, GradientHistogram
from distributed.callbacks.gpus import Gpus
from distributed.config.libraries import check_not_hidden, is_installed
from distributed.config.merging import MergedConfig
from distributed.errors import ConfigError, ResourceError
from distributed.loggers.base import LoggedFit, Recorder, hyperparameters
from distributed.loggers.event_file import EventFile, cut, files_in
from distributed.runs.directory import RunDirectory
from distributed.runs.summary import was_interrupted
from distributed.state import LoggedMedia, TrainState

INSTALL = "pip install 'distributed-trainer[tensorboard]'"
_HPARAMS = "_hparams_/"
_MEDIA = "media/"
_LOGGED = "logged/"  # prefix of values that hooks have logged
HISTOGRAMS = ("weights/", "gradients/")  # prefixes of their tags
_SUCCESS, _FAILURE = 1, 2  # values of Status in api.proto of TensorBoard's plugin hparams


def make(fit: LoggedFit) -> list[Callback]:
    """Return the writer, on the main process only, and the histograms, which all ranks compute."""
    writer = TensorBoard(fit) if fit.context.is_main_process else None
    made: list[Callback] = [] if writer is None else [writer]
    if fit.merged.config.tensorboard_histograms or _asking_for_histograms(fit.callbacks):
        from distributed.loggers.histograms import Histograms

        made.append(Histograms(fit, writer))
    return made


def _asking_for_histograms(callbacks: Sequence[Callback]) -> list[GradientHistogram]:
    return [each for each in callbacks if isinstance(each, GradientHistogram)]


def is_on(merged: MergedConfig) -> bool:
    """Return whether event files are to be written: with `tensorboard=True`, or with only a `tensorboard_dir`."""
    config = merged.config
    if "tensorboard" in config.logger_names:
        return True
    return config.tensorboard or (config.tensorboard_dir is not None and not merged.is_given("tensorboard"))


def check(merged: MergedConfig) -> None:
    """Raise ConfigError for settings that do nothing without event files."""
    is_overruled = merged.is_overruled("tensorboard_histograms", "tensorboard")
    if merged.config.tensorboard_histograms and not is_on(merged) and not is_overruled:
        raise ConfigError("tensorboard_histograms=True has no effect without TensorBoard: set tensorboard=True too")


def check_callbacks(merged: MergedConfig, callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError for a callback that does nothing without event files."""
    if _asking_for_histograms(callbacks) and not is_on(merged):
        raise ConfigError("GradientHistogram has no effect without TensorBoard: set tensorboard=True too")


def check_library(merged: MergedConfig) -> None:
    """Raise ResourceError if `tensorboard` is missing. Imports nothing of it."""
    if not is_installed("tensorboard"):
        raise ResourceError(f"tensorboard=True needs tensorboard, which is not installed: run {INSTALL}")
    check_not_hidden("tensorboard")


def check_directory(merged: MergedConfig) -> None:
    """Raise ConfigError if the user's `tensorboard_dir` cannot be written. The run directory is checked elsewhere."""
    if merged.config.tensorboard_dir is not None:
        RunDirectory(merged.config.tensorboard_dir, "tensorboard_dir", "--tensorboard-dir").prove()


class TensorBoard(Recorder):
    """Write the metrics, times and graph of a fit to event files.

    If the disk fails, figures are lost and one warning is shown, but the run goes on.
    """

    def __init__(self, fit: LoggedFit) -> None:
        self._fit = fit
        self._file: EventFile | None = None
        self._directory: Path | None = None  # None until training has begun
        self._is_losing = False
        self._has_graph = False
        self._gpus = Gpus(fit.context)
        self._first_step = 0
        self._is_resumed = False

    # callbacks

    def on_train_start(self, state: TrainState) -> None:
        self._directory, self._first_step = self._choose(), state.step + 1
        try:
            self._is_resumed = self._directory.is_dir() and bool(files_in(self._directory))
            is_begun = self._is_resumed and cut(self._directory, lambda event: self._is_kept(event, state))
        except OSError as error:
            self._lose(error)
            return
        self._fit.backend.observer.keep_batch(not self._has_graph)
        if not is_begun:
            self.write(_session(_HPARAMS + "session_start_info", session_start_info=_start_info(self._fit)), 0)

    def _is_kept(self, event: Any, state: TrainState) -> bool:
        """Return whether to keep an event of an earlier attempt."""
        self._has_graph = self._has_graph or event.HasField("graph_def")
        is_histogram = bool(event.summary.value) and event.summary.value[0].tag.startswith(HISTOGRAMS)
        if (
            is_histogram
            and event.step == state.step
            and any(each.is_due(state.step) for each in _asking_for_histograms(self._fit.callbacks))
        ):
            return True  # it was written with the update, before any checkpoint of this step
        return _is_before(event, state)

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        if not self._has_graph:  # write it before the figures: a resume keeps the graph and everything before it
            self._has_graph = True
            self._write_graph()
        self.write_scalars({f"{split}/{name}": value for name, value in metrics.items()}, state.step)

    def record_values(self, state: TrainState, values: Mapping[str, float]) -> None:
        self.write_scalars({f"{_LOGGED}{name}": value for name, value in values.items()}, state.step)

    def record_media(self, state: TrainState, media: LoggedMedia) -> None:
        self.write([_shown(media)], media.step)

    def on_times(self, state: TrainState, seconds: Mapping[str, float]) -> None:
        split = {f"time/{name.removesuffix('_s')}": s for name, s in seconds.items() if not name.startswith("rank_")}
        ranks = [s for name, s in seconds.items() if name.startswith("rank_")]
        split |= {"time/fastest_rank": min(ranks), "time/slowest_rank": max(ranks)} if len(ranks) > 1 else {}
        self.write_scalars(split | self._gpus.read(), state.step)

    def on_train_end(self, state: TrainState) -> None:
        self._end(state, None if was_interrupted(state) else _SUCCESS)

    def on_error(self, state: TrainState, error: BaseException) -> None:
        self._end(state, _FAILURE)

    # writing

    def write_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write one point of each tag."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.write((Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()), step)

    def write(self, values: Iterable[Any], step: int) -> None:
        """Write the summary values of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _append(self, event: Any) -> None:
        try:
            if self._file is None:
                self._file = self._opened()
            self._file.write(event)
        except OSError as error:
            self._lose(error)

    def _opened(self) -> EventFile:
        """Return a new event file. In a resumed run, its first event tells TensorBoard from which step on to drop earlier events."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        assert self._directory is not None
        first = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if self._is_resumed:
            start = SessionLog(status=SessionLog.START)
            first.append(Event(wall_time=time.time(), step=self._first_step, session_log=start))
        return EventFile(self._directory, first)

    def _lose(self, error: OSError) -> None:
        if not self._is_losing:
            text = f"{self._directory} cannot be written ({error.strerror}): figures for TensorBoard are lost until it can be written"
            self._fit.on_event({"kind": "warning", "text": text})
        self._is_losing = True

    def _write_graph(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        try:
            graph = self._fit.backend.observer.graph()
        except Exception as error:  # the user's model runs under a tracer, and may raise errors of any kind
            reason = next(iter(str(error).splitlines()), "")
            text = (
                f"TensorBoard shows no graph of the model, which could not be traced ({type(error).__name__}: {reason})"
            )
            self._fit.on_event({"kind": "notice", "text": text})
            return
        self._append(Event(wall_time=time.time(), graph_def=graph))

    def _end(self, state: TrainState, status: int | None) -> None:
        """End the session. `status` is None for a run that a signal ended, because the run can be resumed."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import SessionEndInfo

        if self._directory is None:  # training never began
            return
        if status is not None:
            end = SessionEndInfo(status=status, end_time_secs=time.time())
            self.write(_session(_HPARAMS + "session_end_info", session_end_info=end), state.step)
        if self._file is not None:
            self._file.close()
        self._file = self._directory = None
        self._gpus.close()

    def _choose(self) -> Path:
        """Return the directory for the event files: below `tensorboard_dir` if that is set, so that runs can be compared there."""
        run, directory = self._fit.run, self._fit.merged.config.tensorboard_dir
        if directory is None:
            return run.path / "tensorboard"
        known = [event["directory"] for event in run.read_events() if event["event"] == "tensorboard"]
        name = known[-1] if known else _free_name(Path(directory), run.path)
        if not known:  # a resumed run uses the recorded name again
            run.event("tensorboard", directory=name)
        return Path(directory) / name


def _free_name(directory: Path, run: Path) -> str:
    """Return the name of the run, with a number added if another run has used the name."""
    base = f"{run.parent.name}-{run.name}" if run.name.startswith("fit-") else run.resolve().name
    number, name = 1, base
    while (directory / name).exists():
        number += 1
        name = f"{base}-{number}"
    return name


def _is_before(event: Any, state: TrainState) -> bool:
    """Return whether the event was written before `state`, so that it will not be written again.

    An event of this very step will be written again if its epoch, its validation or the interval of its log line is unfinished.
    """
    if event.HasField("graph_def"):
        return True
    if not event.summary.value:
        return False
    tag = event.summary.value[0].tag
    if tag.startswith(_HPARAMS):
        return bool(tag.endswith("session_start_info"))
    if event.step != state.step:
        return bool(event.step < state.step)
    if tag.startswith(_MEDIA):
        return True
    if tag.startswith("val/"):
        return state.has_row
    if tag.startswith(_LOGGED):
        return state.has_row or not state.log_sums
    return not (state.samples_in_epoch if tag.startswith(HISTOGRAMS) else state.log_sums)


# media


def _shown(media: LoggedMedia) -> Any:
    """Return the summary value of an image, a text or the like. A table is a text."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    tag = f"{_MEDIA}{media.full_name}"
    if media.kind in ("image", "figure"):
        width, height = struct.unpack(">II", media.content[16:24])  # of the PNG's header
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=media.content)
        return Summary.Value(tag=tag, image=image)
    if media.kind == "audio":
        with wave.open(io.BytesIO(media.content)) as file:
            audio = Summary.Audio(
                sample_rate=file.getframerate(), num_channels=file.getnchannels(), length_frames=file.getnframes(),
                encoded_audio_string=media.content, content_type="audio/wav",
            )  # fmt: skip
        return Summary.Value(tag=tag, audio=audio)
    text = _markdown(media.content) if media.kind == "table" else media.content
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[text])
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _markdown(table: bytes) -> bytes:
    """Return a CSV table as Markdown, which TensorBoard draws."""
    try:
        head, *rows = csv.reader(io.StringIO(table.decode()))
    except csv.Error:  # a very long cell
        return table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines).encode()


# hyperparameters


def _session(tag: str, **info: Any) -> list[Any]:
    """Return a record for TensorBoard's HParams tab. The content of such a record is in its metadata."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_FLOAT
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = HParamsPluginData(version=0, **info).SerializeToString()
    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
    empty = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=0)]))
    return [Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=empty)]


def _start_info(fit: LoggedFit) -> Any:
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo

    info = SessionStartInfo(start_time_secs=time.time())
    for name, value in hyperparameters(fit).items():
        kind = {bool: "bool_value", int: "number_value", float: "number_value"}.get(type(value), "string_value")
        setattr(info.hparams[name], kind, str(value) if kind == "string_value" else value)
    return info
