"""Images, texts, tables, audio and figures: their files, where they are shown, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import wave
from pathlib import Path

import matplotlib.figure
import numpy
import PIL.Image
import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import Callback, ConfigError, Logger, Trainer
from distributed.loggers import Audio, Figure, Image, Table, Text
from distributed.loggers.files import MediaFiles
from distributed.loggers.logged import Logged
from distributed.report import report_text
from distributed.state import LoggedMedia, TrainState
from tests.unit.test_log import on_ranks

DATA = TensorDataset(torch.arange(32.0).reshape(16, 2) / 32, torch.arange(16) % 3)
PIXELS = numpy.arange(2 * 5 * 3, dtype=numpy.uint8).reshape(2, 5, 3)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def content(media):
    return media.held().encoded()


def opened(image):
    return numpy.asarray(PIL.Image.open(io.BytesIO(content(image))))


@pytest.mark.parametrize(
    "pixels",
    [
        PIXELS,
        PIXELS.transpose(2, 0, 1),
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS / 255).permute(2, 0, 1),
        torch.from_numpy(PIXELS / 255).to(torch.bfloat16),
        PIL.Image.fromarray(PIXELS),
    ],
    ids=["last", "first", "tensor", "floats", "bfloat16", "pillow"],
)
def test_each_form_of_an_image_is_the_same_png(pixels):
    assert opened(Image(pixels)).tolist() == PIXELS.tolist()


@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels(channels):
    pixels = numpy.arange(5 * 7 * channels, dtype=numpy.uint8).reshape(5, 7, channels)
    assert opened(Image(pixels)).reshape(5, 7, channels).tolist() == pixels.tolist()
    assert opened(Image(pixels[:, :, 0])).tolist() == pixels[:, :, 0].tolist()


def test_floats_are_cut_to_their_range():
    assert opened(Image(numpy.array([[-1.0, 0.5, 2.0, numpy.nan]]))).tolist() == [[0, 128, 255, 0]]


def test_channels_say_which_dimension_is_meant():
    pixels = numpy.arange(3 * 2 * 3, dtype=numpy.uint8).reshape(3, 2, 3)
    assert opened(Image(pixels, channels="last")).tolist() == pixels.tolist()
    assert opened(Image(pixels, channels="first")).tolist() == numpy.moveaxis(pixels, 0, -1).tolist()


@pytest.mark.parametrize("factor", [1.0, 32767], ids=["floats", "int16"])
def test_audio_is_a_wav_of_16_bits(factor):
    samples = (numpy.array([[0.0, 1.0], [-1.0, 0.5]]) * factor).astype(numpy.int16 if factor > 1 else numpy.float64)
    with wave.open(io.BytesIO(content(Audio(samples, 8000)))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (2, 8000, 2)
        found = numpy.frombuffer(file.readframes(2), "<i2")
    assert found.tolist() == [0, 32767, -32767, 16383]


def test_tables_and_texts_and_figures():
    rows = list(csv.reader(io.StringIO(content(Table(["word", "count"], [("a, b", 1), ("ü", 2)])).decode())))
    assert rows == [["word", "count"], ["a, b", "1"], ["ü", "2"]]
    assert content(Text("grün")) == "grün".encode()
    figure = matplotlib.figure.Figure()
    figure.add_subplot().plot([1, 2])
    assert content(Figure(figure)).startswith(b"\x89PNG")


def test_an_image_is_that_of_the_moment_when_it_is_logged():
    pixels = torch.zeros(2, 2)
    held = Image(pixels).held()
    pixels += 1
    assert held.encoded() == content(Image(torch.zeros(2, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Image(numpy.zeros((2, 5, 7))), r"Image of shape \[2, 5, 7\] is no image"),
        (lambda: Image(numpy.zeros((3, 5, 3))), "two axes that may be its channels: pass channels='first' or 'last'"),
        (lambda: Image(numpy.zeros(3)), "is no image"),
        (lambda: Image(numpy.zeros((2, 2), int)), "Image got int64: pass uint8 from 0 to 255, or floats from 0 to 1"),
        (lambda: Image("picture.png"), "a str is no array of numbers"),
        (lambda: Image(PIXELS, channels="middle"), "choose 'first' or 'last'"),
        (lambda: Audio(numpy.zeros((1, 2, 3)), 8000), r"Audio got float64 of shape \[1, 2, 3\]"),
        (lambda: Image(numpy.zeros((5, 4, 4)), channels="first"), r"Image of shape \[5, 4, 4\] is no image"),
        (lambda: Image(numpy.zeros((0, 5))), r"Image of shape \[0, 5\] has no pixels"),
        (
            lambda: Audio(numpy.zeros((1, 48000)), 16000),
            r"has 48000 channels: pass \[time, channels\], such as samples.T",
        ),
        (lambda: Audio(numpy.zeros(5), 0), r"Audio\(sample_rate=0\): give the samples per second"),
        (lambda: Table(["a", "b"], [[1]]), "Table has 2 columns, but a row of 1 values"),
        (lambda: Figure(3), "Figure got a int: pass a matplotlib figure"),
    ],
)
def test_what_cannot_be_stored_is_refused_where_it_is_logged(make, message):
    logged = Logged()
    logged.begin(1, (), takes_media=True)  # also on a rank that would not keep it
    with pytest.raises(ConfigError, match=message):
        logged.log("sample", make())


def test_media_are_refused_where_they_have_no_place():
    logged = Logged()
    logged.log("sample", Image(PIXELS))  # as in an evaluation, which has no run directory
    assert not logged.is_pending
    logged.begin(0, (), takes_media=True)
    with pytest.raises(ConfigError, match="cannot be reduced: drop reduce"):
        logged.log("sample", Text("a"), reduce="max")
    with pytest.raises(ConfigError, match="a name too long for a file"):
        logged.log("a" * 300, Text("a"))


# ---------------------------------------------------------------------- in a fit


class Everything(Callback):
    def on_step_end(self, state, result):
        if state.step % 3 == 0:
            self.context.log("samples/first", Image(PIXELS))
            self.context.log("samples/first", Image(PIXELS))

    def on_epoch_end(self, state, metrics):
        self.context.log("words", Table(["word", "count"], [("a|b", state.step)]))
        self.context.log("note", Text("<b>said</b>"))
        self.context.log("tone", Audio(numpy.zeros(8), 8000))
        figure = matplotlib.figure.Figure()
        figure.add_subplot().plot([1, 2])
        self.context.log("curve", Figure(figure))


class Kept(Logger):
    def __init__(self):
        self.media = []

    def log_media(self, media):
        self.media.append(media)


class AtBothEnds(Callback):
    """Log one name at the end of a fit and at the start of the next one, which is the same step."""

    def on_train_start(self, state):
        self.context.log("note", Text(f"start at {state.step}"))

    def on_train_end(self, state):
        self.context.log("note", Text(f"end at {state.step}"))


def test_media_of_one_name_and_step_in_two_fits_keep_their_files():
    kept = Kept()
    given = {"backend": "single", "device": "cpu", "batch_size": 4, "verbose": False, "callbacks": [AtBothEnds()]}
    trainer = Trainer(lambda: torch.nn.Linear(2, 3), loggers=[kept], **given)
    trainer.fit(DATA)
    run_dir = Path(trainer.fit(DATA, epochs=1).run_dir)
    texts = ["start at 0", "end at 4", "start at 4", "end at 8"]
    found = [json.loads(line)["path"] for line in (run_dir / "media.jsonl").read_text().splitlines()]
    assert found == [f"media/note-0000000{end}.txt" for end in ("0", "4", "4-2", "8")]
    assert [(run_dir / path).read_text() for path in found] == texts == [each.content.decode() for each in kept.media]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The run directory of a fit that logs everything, and what its logger got."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        kept = Kept()
        trainer = Trainer(
            lambda: torch.nn.Linear(2, 3), backend="single", device="cpu", epochs=2, batch_size=4, log_every_n_steps=2,
            verbose=False, callbacks=[Everything()], loggers=["tensorboard", kept],
        )  # fmt: skip
        yield Path(trainer.fit(DATA).run_dir).absolute(), kept.media


NAMES = [
    "samples%2Ffirst-00000003.png", "samples%2Ffirst-00000003-2.png", "words-00000004.csv", "note-00000004.txt",
    "tone-00000004.wav", "curve-00000004.png", "samples%2Ffirst-00000006.png", "samples%2Ffirst-00000006-2.png",
    "words-00000008.csv", "note-00000008.txt", "tone-00000008.wav", "curve-00000008.png",
]  # fmt: skip


def test_each_is_a_file_and_a_row(run_dir):
    run_dir, _ = run_dir
    found = [json.loads(line) for line in (run_dir / "media.jsonl").read_text().splitlines()]
    assert [row["path"] for row in found] == [f"media/{name}" for name in NAMES]
    assert [(row["name"], row["kind"], row["step"]) for row in found[:3]] == [
        ("samples/first", "image", 3), ("samples/first", "image", 3), ("words", "table", 4),
    ]  # fmt: skip
    assert sorted(path.name for path in (run_dir / "media").iterdir()) == sorted(NAMES)


def test_a_logger_gets_each_in_order(run_dir):
    run_dir, media = run_dir
    assert [each.path for each in media] == [str(run_dir / "media" / name) for name in NAMES]
    assert all(each.content == Path(each.path).read_bytes() for each in media)


def test_tensorboard_reads_each(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, _ = run_dir
    found = EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"images": 0, "audio": 0, "tensors": 0}
    ).Reload()
    images = found.Images("media/samples/first")
    assert [image.step for image in images] == [3, 3, 6, 6] and (images[0].width, images[0].height) == (5, 2)
    assert numpy.asarray(PIL.Image.open(io.BytesIO(images[0].encoded_image_string))).tolist() == PIXELS.tolist()
    (audio, _) = found.Audio("media/tone")
    assert audio.sample_rate == 8000 and audio.content_type == "audio/wav"
    texts = {name: found.Tensors(f"media/{name}")[-1].tensor_proto.string_val[0] for name in ("note", "words")}
    assert texts == {"note": b"<b>said</b>", "words": b"| word | count |\n| --- | --- |\n| a\\|b | 8 |"}
    assert found.Images("media/curve")


def test_the_report_shows_the_newest_of_each_name(run_dir):
    run_dir, _ = run_dir
    text = report_text([run_dir])
    assert "samples/first at step 6<" in text and "samples/first at step 3<" not in text
    assert text.count('src="data:image/png;base64,') == 2 and text.count('src="data:audio/wav;base64,') == 1
    assert "&lt;b&gt;said&lt;/b&gt;" in text and "<td>a|b</td><td>8</td>" in text


def test_by_default_only_the_main_process_keeps_media():
    def log(rank, context, state, hook):
        if state.step == 4:
            context.log("one", Text(f"of {rank}"))
            context.log("each", Text(f"of {rank}"), on_every_rank=True)

    for each in on_ranks(2, log):
        found = [
            (media.full_name, media.step, media.path, media.content) for media in each.media if media.path[-5] != "2"
        ]
        assert found == [
            ("one", 4, "media/one-00000004.txt", b"of 0"),
            ("each/rank_0", 4, "media/each-00000004-rank_0.txt", b"of 0"),
            ("each/rank_1", 4, "media/each-00000004-rank_1.txt", b"of 1"),
        ]


def test_rows_after_a_checkpoint_are_dropped_by_a_resume(tmp_path):
    def log(steps, state):
        files = MediaFiles(tmp_path / "media.jsonl")
        files.on_train_start(state)
        for step in steps:
            files.record_media(state, LoggedMedia("note", "text", step, None, f"media/note-{step}.txt", b"a"))
        files.on_train_end(state)

    log([1, 2, 3], TrainState())
    log([3, 4], TrainState(step=2))
    found = [json.loads(line)["step"] for line in (tmp_path / "media.jsonl").read_text().splitlines()]
    assert found == [1, 2, 3, 4]
