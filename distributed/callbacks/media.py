"""Images, texts, tables, audio and figures that the user's code logs, as bytes of common file formats."""

from __future__ import annotations

import abc
import csv
import dataclasses
import io
import struct
import wave
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

from distributed.errors import ConfigError

_MOST_CHANNELS = 64  # of audio; more are a swapped shape


@dataclasses.dataclass(frozen=True)
class Media(abc.ABC):
    """Base class of what can be logged besides numbers."""

    kind: ClassVar[str]
    suffix: ClassVar[str]  # of its file

    def held(self) -> Media:
        """Return an object that later changes of the user's arrays do not affect. Does not wait for a device.

        Raises ConfigError if the object cannot be logged.
        """
        return self

    @abc.abstractmethod
    def encoded(self) -> bytes:
        """Return the content of its file. May wait for a device."""


@dataclasses.dataclass(frozen=True)
class Image(Media):
    """An image, stored as PNG.

    Args:
        pixels: an array or a tensor of shape [height, width], [height, width, channels] or [channels, height, width] with 1, 3
            or 4 channels, or a PIL image. Whole numbers must be uint8. Floats are clipped to [0, 1].
        channels: "first" or "last". None detects it from the shape, which fails only if the first and the last dimension could both
            be the channels.
    """

    pixels: Any
    channels: str | None = None
    kind: ClassVar[str] = "image"
    suffix: ClassVar[str] = "png"

    def held(self) -> Image:
        pixels = _held(self.pixels)
        shape, kind = tuple(pixels.shape), str(pixels.dtype).removeprefix("torch.")
        if kind != "uint8" and "float" not in kind and kind != "bool":
            raise ConfigError(f"Image got {kind}: pass uint8 from 0 to 255, or floats from 0 to 1")
        if self.channels not in (None, "first", "last"):
            raise ConfigError(f"Image(channels={self.channels!r}): choose 'first' or 'last'")
        if 0 in shape:
            raise ConfigError(f"Image of shape {list(shape)} has no pixels: log an image with some")
        return Image(pixels, _axis_of_channels(shape, self.channels))

    def encoded(self) -> bytes:
        import numpy

        pixels = _on_host(self.pixels)
        if pixels.dtype != numpy.uint8:
            pixels = numpy.nan_to_num(pixels.astype(numpy.float32), copy=False)
            pixels = (numpy.clip(pixels, 0, 1, out=pixels) * 255 + 0.5).astype(numpy.uint8)
        if pixels.ndim == 3 and self.channels == "first":
            pixels = numpy.moveaxis(pixels, 0, -1)
        return png(pixels if pixels.ndim == 3 else pixels[:, :, None])


@dataclasses.dataclass(frozen=True)
class Text(Media):
    """A text, stored as UTF-8.

    Args:
        text: the text. Any other object is logged as `str(text)`.
    """

    text: str
    kind: ClassVar[str] = "text"
    suffix: ClassVar[str] = "txt"

    def encoded(self) -> bytes:
        return str(self.text).encode(errors="backslashreplace")


@dataclasses.dataclass(frozen=True)
class Table(Media):
    """A table, stored as CSV.

    Args:
        columns: the names of the columns.
        rows: one sequence of values for each row.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kind: ClassVar[str] = "table"
    suffix: ClassVar[str] = "csv"

    def held(self) -> Table:
        rows = [list(row) for row in self.rows]
        if wrong := next((row for row in rows if len(row) != len(self.columns)), None):
            raise ConfigError(f"Table has {len(self.columns)} columns, but a row of {len(wrong)} values: {wrong!r}")
        return Table(list(self.columns), rows)

    def encoded(self) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue().encode(errors="backslashreplace")


@dataclasses.dataclass(frozen=True)
class Audio(Media):
    """Sound, stored as WAV with 16 bits per sample.

    Args:
        samples: an array or a tensor of shape [time] or [time, channels]: floats, which are clipped to [-1, 1], or int16.
        sample_rate: samples per second.
    """

    samples: Any
    sample_rate: int
    kind: ClassVar[str] = "audio"
    suffix: ClassVar[str] = "wav"

    def held(self) -> Audio:
        samples = _held(self.samples)
        kind = str(samples.dtype).removeprefix("torch.")
        if len(samples.shape) not in (1, 2) or (kind != "int16" and "float" not in kind):
            raise ConfigError(
                f"Audio got {kind} of shape {list(samples.shape)}: pass floats or int16 of shape [time] or [time, channels]"
            )
        if len(samples.shape) == 2 and samples.shape[1] > _MOST_CHANNELS:
            raise ConfigError(
                f"Audio of shape {list(samples.shape)} has {samples.shape[1]} channels: pass [time, channels], such as samples.T"
            )
        if not 0 < self.sample_rate < 1 << 32:
            raise ConfigError(f"Audio(sample_rate={self.sample_rate!r}): give the samples per second")
        return Audio(samples, self.sample_rate)

    def encoded(self) -> bytes:
        import numpy

        samples = _on_host(self.samples)
        if samples.dtype != numpy.int16:
            samples = (numpy.clip(numpy.nan_to_num(samples.astype(numpy.float32)), -1, 1) * 32767).astype(numpy.int16)
        content = io.BytesIO()
        with wave.open(content, "wb") as file:
            file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
            file.setsampwidth(2)
            file.setframerate(int(self.sample_rate))
            file.writeframes(samples.astype("<i2").tobytes())
        return content.getvalue()


@dataclasses.dataclass(frozen=True)
class Figure(Media):
    """A figure, drawn when it is logged and stored as PNG.

    Args:
        figure: a matplotlib figure, or another object with a method `savefig(file, format="png")`.
    """

    figure: Any
    kind: ClassVar[str] = "figure"
    suffix: ClassVar[str] = "png"

    def held(self) -> Figure:
        if isinstance(self.figure, bytes):
            return self
        if not hasattr(self.figure, "savefig"):
            raise ConfigError(f"Figure got a {type(self.figure).__name__}: pass a matplotlib figure, or log an Image")
        content = io.BytesIO()
        self.figure.savefig(content, format="png")
        return Figure(content.getvalue())

    def encoded(self) -> bytes:
        return bytes(self.figure)


def png(pixels: Any) -> bytes:
    """Return a PNG file of `pixels`, a uint8 array of shape [height, width, channels] with 1, 3 or 4 channels."""
    import numpy

    height, width, channels = pixels.shape
    # The first byte of a line says that the line is not filtered.
    lines = numpy.zeros((height, 1 + width * channels), numpy.uint8)
    lines[:, 1:] = numpy.ascontiguousarray(pixels).reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _axis_of_channels(shape: tuple[int, ...], wanted: str | None) -> str:
    """Return "first" or "last". Raises ConfigError if the shape fits no image, allows both axes, or contradicts `wanted`."""
    first, last = len(shape) == 3 and shape[0] in (1, 3, 4), len(shape) == 3 and shape[-1] in (1, 3, 4)
    if (wanted == "first" and first) or (wanted == "last" and last):
        return wanted
    if len(shape) == 2 or (wanted is None and first != last):
        return "first" if first else "last"
    if first and wanted is None:
        raise ConfigError(
            f"Image of shape {list(shape)} has two axes that may be its channels: pass channels='first' or 'last'"
        )
    raise ConfigError(
        f"Image of shape {list(shape)} is no image: pass [height, width], or 1, 3 or 4 channels as the first or the last dimension"
    )


def _held(array: Any) -> Any:
    """Return a copy of an array, on its device if it is a torch tensor. Raises ConfigError for anything else."""
    if hasattr(array, "detach"):
        return array.detach().clone()
    import numpy

    copy = numpy.array(array)
    if copy.dtype.kind not in "fiub":
        raise ConfigError(f"a {type(array).__name__} is no array of numbers: pass an array or a tensor")
    return copy


def _on_host(array: Any) -> Any:
    """Return a NumPy array."""
    if not hasattr(array, "detach"):
        return array
    array = array.cpu()
    return (array.float() if array.is_floating_point() else array).numpy()  # NumPy has no bfloat16
