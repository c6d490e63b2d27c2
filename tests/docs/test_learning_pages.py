"""The pages to learn from (start, tutorials, concepts, coming-from, questions) run from top to bottom in one directory.

`python NAME` and `yaml NAME` are files that stand there from the start. `diff NAME` is a whole file before and after a change:
NAME is the file after it. `text output` is what the sample before it prints, where `...` stands for any text.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import shlex

import pytest

from tests.cli.test_help import parse
from tests.conftest import needs_backend
from tests.docs.test_pages import LEARNING, ROOT, blocks, name_of, write_files

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
    """Return what happens from the top to the bottom of a page: ("python", code), ("bash", line) or ("output", text)."""
    found, cells = [], ""
    for language, beside, code in blocks(page):
        if (language, beside) == ("python", "notebook"):
            cells += code + "\n"
        elif (language, beside) == ("python", ""):
            found.append(("python", code))
        elif language == "bash":
            found += [("bash", line) for line in code.splitlines() if line.startswith("python ")]
        elif (language, beside) == ("text", "output"):
            found.append(("output", code))
    return [*found, ("python", cells)] if cells else found


def shows(text, output):
    """Whether each line of `text` is in the output, in this order."""
    pattern = ".*?^".join(re.escape(line.rstrip()).replace(re.escape("..."), "[^\n]*") for line in text.splitlines())
    return re.search(f"^{pattern}", output, re.M | re.S)


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
    for number, (kind, text) in enumerate(steps(page)):
        if kind == "output":
            assert shows(text, output), f"{text}\n--- is not in\n{output}"
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
