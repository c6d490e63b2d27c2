"""The pages to learn from (start, tutorials, concepts, coming-from, questions) run from top to bottom in one directory.

`python NAME` and `yaml NAME` are files that stand there from the start. `diff NAME` is a whole file before and after a change:
NAME is the file after it. `text output` is what the sample before it prints, where `...` stands for any text.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import html
import importlib.util
import inspect
import re
import runpy
import shlex
from pathlib import Path

import pytest

import distributed
from distributed.cli.train import train_parser
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from tests.cli.test_help import parse
from tests.conftest import needs_backend
from tests.docs.test_pages import LEARNING, ROOT, blocks, name_of, write_files
from tests.kernel import QUIET, Kernel

# Pages whose trainings run. Those of other pages are only parsed, unless they have --dry-run: the scripts of coming-from/ run below.
REAL = ("start", "tutorials/")
# Page -> the backends that its samples need. Pages with Ray start a cluster each.
NEEDS = {"coming-from/horovod": "horovod", "coming-from/ray-train": "ray", "tutorials/sweep": "ray"}
SLOW = {"coming-from/ray-train", "tutorials/sweep", "tutorials/hugging-face"}
# Page -> what runs the file before the change. The first is for the file after it too, unless its backend is another.
TRAIN = "-m distributed.cli train --nproc-per-node 2 --device cpu --script"
DIFFS = {
    "ddp": (TRAIN, TRAIN),
    "accelerate": (TRAIN, TRAIN),
    "horovod": (f"-m distributed.cli train --backend horovod {TRAIN.partition('train ')[2]}",) * 2,
    "keras": ("", f"{TRAIN.removesuffix(' --script')} --backend pytorch-ddp --script"),
    "hf-trainer": (TRAIN, TRAIN),
    "ray-train": ("", ""),
    # Lightning trains on one device: on several it shuffles, whatever the DataLoader does
    "lightning": ("", TRAIN.replace("--script", "--global-batch-size 16 --script")),
}
FULL = {"keras", "hf-trainer", "ray-train"}  # each takes ten seconds or more


def page_of(name):
    return ROOT / "docs" / f"{name}.md"


def sides(text):
    """Return the file before and after a change from a diff of the whole file."""
    lines = text.splitlines()
    return ("\n".join(line[1:] for line in lines if not line.startswith(skipped)) + "\n" for skipped in "+-")


def prepare(page, directory):
    """Write the files that the page names."""
    write_files(page, directory)
    for language, beside, code in blocks(page):
        if language == "diff":
            (directory / beside).write_text(list(sides(code))[1])


def steps(page):
    """Return what happens from the top to the bottom of a page: ("python", code), ("notebook", cell), ("bash", line) or
    ("output", text)."""
    found = []
    for language, beside, code in blocks(page):
        if (language, beside) == ("python", "notebook"):
            found.append(("notebook", code))
        elif (language, beside) == ("python", ""):
            found.append(("python", code))
        elif language == "bash":
            found += [("bash", line) for line in code.splitlines() if line.startswith("python ")]
        elif (language, beside) == ("text", "output"):
            found.append(("output", code))
    return found


def shows(text, output):
    """Whether each line of `text` is in the output, in this order."""
    pattern = ".*?^".join(re.escape(line.rstrip()).replace(re.escape("..."), "[^\n]*") for line in text.splitlines())
    return re.search(f"^{pattern}", output, re.M | re.S)


@QUIET
@pytest.mark.docs
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.full] * (name_of(page) in SLOW), id=name_of(page)) for page in LEARNING],
)
def test_a_page_runs_from_top_to_bottom(page, run_python, tmp_path):
    if backend := NEEDS.get(name_of(page)):
        needs_backend(backend)
    prepare(page, tmp_path)
    output = ""
    with contextlib.ExitStack() as stack:
        kernel = functools.cache(lambda: stack.enter_context(Kernel(tmp_path)))  # one for all cells of the page
        for number, (kind, text) in enumerate(steps(page)):
            if kind == "output":
                assert shows(text, output), f"{text}\n--- is not in\n{output}"
                continue
            if kind == "notebook":
                output = kernel().run(text)
                assert [each.text for each in kernel().outputs if each.get("name") == "stderr"] == []
                continue
            if kind == "python":
                (tmp_path / f"sample-{number}.py").write_text(text)
                words = [f"sample-{number}.py"]
            else:
                words = shlex.split(text)[1:]
                is_training = words[1:3] == ["distributed.cli", "train"] and "--dry-run" not in words
                if is_training and not name_of(page).startswith(REAL):
                    parse(words[2], words[3:])
                    continue
            done = run_python(words, timeout=120, cwd=tmp_path)
            assert done.returncode == 0, f"{text}\n{done.output}"
            output = done.stdout


@pytest.mark.docs
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in FULL)) for n in DIFFS])
def test_a_script_gives_the_same_loss_before_and_after_the_change(name, run_python, tmp_path):
    page = page_of(f"coming-from/{name}")
    if backend := NEEDS.get(f"coming-from/{name}"):
        needs_backend(backend)
    if name in ("accelerate", "hf-trainer") and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed here")
    ((_, _, diff),) = [block for block in blocks(page) if block[0] == "diff"]
    losses = []
    for side, code, command in zip(("before", "after"), sides(diff), DIFFS[name], strict=True):
        (tmp_path / f"{side}.py").write_text(code.replace("devices=2", "devices=1"))
        env = {"RAY_raylet_start_wait_time_s": "60"}  # for a script that starts Ray itself, on a busy machine
        if name == "keras" and side == "before":
            env["KERAS_BACKEND"] = "torch"
        done = run_python([*command.split(), f"{side}.py"], timeout=240, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.output
        losses.append(float(re.findall(r"loss (\d\.\d{6})\s*$", done.stdout, re.M)[-1]))

    assert losses[0] == pytest.approx(losses[1], abs=2e-6) and losses[1] < 2


@pytest.mark.docs
@pytest.mark.full
def test_the_script_of_keras_gives_the_same_loss_on_tensorflow(run_python, tmp_path):
    needs_backend("tensorflow")
    page = page_of("coming-from/keras")
    ((_, _, diff),) = [block for block in blocks(page) if block[0] == "diff"]
    (command,) = [text for _, text in steps(page) if "--backend tensorflow" in text]
    losses = []
    for code, words in zip(sides(diff), (["train.py"], shlex.split(command)[1:]), strict=True):
        (tmp_path / "train.py").write_text(code)
        done = run_python(words, timeout=240, cwd=tmp_path, env={"KERAS_BACKEND": "tensorflow"})
        assert done.returncode == 0, done.output
        losses.append(float(re.findall(r"loss (\d\.\d{6})\s*$", done.stdout, re.M)[-1]))

    assert losses[0] == pytest.approx(losses[1], abs=2e-6) and losses[1] < 2


def codes_of_tables():
    """Yield the code in the column "here" of the tables for users of other libraries."""
    for page in (ROOT / "docs/coming-from").glob("*.md"):
        for line in page.read_text().splitlines():
            if line.startswith("| "):
                yield from re.findall(r"`([^`]+)`", line.split(" | ", 1)[1])


def check_code(code):
    """Raise if a flag, a setting and its value, an argument, a method and its arguments or a name does not exist."""
    settings = {field.name for field in dataclasses.fields(DistributedConfig)}
    others = {
        *inspect.signature(distributed.Trainer).parameters,
        *inspect.signature(distributed.Trainer.fit).parameters,
    }
    owners = {"trainer": distributed.Trainer, "s": distributed.Session, "distributed": distributed}
    if "-m distributed.cli " in code:
        verb, *words = shlex.split(code.partition("-m distributed.cli ")[2])
        parse(verb, words)
    elif re.match(r"(distributed|train|--\w+)\b", code) and "(" not in code:
        unknown = {*re.findall(r"(?<!\S)--[\w-]+", code)} - {*train_parser()._option_string_actions}
        assert not unknown, unknown
    elif re.match(r"\w+=", code):
        values = {each.arg: each.value for each in ast.parse(f"f({code})", mode="eval").body.keywords}
        literals = {}
        for name, value in values.items():
            assert name in settings | others, name
            with contextlib.suppress(ValueError):  # an object, or `...`
                literals[name] = ast.literal_eval(value)
        DistributedConfig(**{name: value for name, value in literals.items() if name in settings and value != {...}})
    elif found := re.fullmatch(r"(?:with )?(\w+)\.(\w+)(\(.*\))?(?: as .*)?", code):
        function = getattr(owners[found[1]], found[2])
        if found[3]:
            call = ast.parse(f"f{found[3]}", mode="eval").body
            arguments = [...] * (len(call.args) + (found[1] != "distributed"))
            inspect.signature(function).bind(*arguments, **{each.arg: ... for each in call.keywords})
    elif found := re.fullmatch(r"(\w+)(\(.*\))?", code):
        places = (distributed, distributed.Trainer, distributed.Session)
        assert found[1] in settings | others or any(hasattr(place, found[1]) for place in places), code


def test_what_users_of_other_libraries_are_told_to_write_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text("{}")
    foreign = {"TF_CONFIG", "DataLoader(shuffle=True)", "CSVLogger", "config.yaml"}
    codes = set(codes_of_tables()) - foreign
    assert len(codes) > 80
    for code in codes:
        check_code(code)


@pytest.mark.parametrize(
    "code",
    ["--num-node 2", "epoch=3", "device='gpus'", "ddp={'find_unused': True}", "trainer.saves(path)", "trainer.log(name)", "keep_bests"],
)  # fmt: skip
def test_what_does_not_exist_is_found(code):
    with pytest.raises((AssertionError, AttributeError, TypeError, ConfigError)):
        check_code(code)


def templates(file):
    """Return the strings of a file, with NUL where a value is put in."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_our_messages_on_the_page_of_messages_are_in_the_code():
    ours = page_of("troubleshooting").read_text().partition("## Messages of libraries")[0]
    headings = re.findall(r"^### `(.+)`$", ours, re.M)
    texts = "\1".join(text for file in (ROOT / "distributed").rglob("*.py") for text in templates(file))

    assert len(headings) > 20
    for heading in headings:
        words = re.sub(
            r"'[\w-]+'|\b\d+ \(SIG\w+\)|\bnan\b|(?<=shows )no GPU|^GPUs(?= per)|^needs mlflow", "\0", heading
        )
        parts = [part.strip() for part in words.split("\0") if part.strip()]
        assert re.search("[^\1]{0,40}".join(map(re.escape, parts)), texts), heading


def test_the_pictures_are_what_the_script_draws():
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_concepts.py"))["PICTURES"]
    pages = sorted(path.stem for path in (ROOT / "docs" / "concepts").glob("*.md") if path.stem != "index")

    assert sorted(drawn) == pages
    for name, draw in drawn.items():
        assert (ROOT / "docs" / "images" / f"concept-{name}.svg").read_text() == draw()
        assert f"](../images/concept-{name}.svg)" in page_of(f"concepts/{name}").read_text()


def texts(picture):
    """Return the lines of a picture of a terminal, with 0 for each number."""
    rows = {}
    for x, y, text in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', picture.read_text()):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text)))
    return [re.sub(r"[\d.]+", "0", "".join(text for _, text in sorted(row))) for _, row in sorted(rows.items())]


@pytest.mark.docs
@pytest.mark.full
def test_the_picture_of_a_run_shows_what_a_run_prints(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "draw_run.py"))
    script["main"](tmp_path / "run.svg")
    drawn = texts(tmp_path / "run.svg")
    assert drawn == texts(script["IMAGE"]) and len(drawn) > 12
