"""Make the pictures of the documentation, docs/images/*.png, from real runs in a headless Chromium: `make screenshots`.

It runs examples/train.py on one, two and three processes and a sweep over it, and shows them in reports, TensorBoard
and MLflow. It takes some minutes on two cores.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from browser import Browser

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CLI = [sys.executable, "-m", "distributed.cli"]
TRACKED = ["--tensorboard", "--mlflow-tracking"]
SPACE = """\
learning_rate: {loguniform: [1e-4, 1e-1]}
batch_size: [32, 64, 128]
"""
# The text of a page, including the text inside of its custom elements.
TEXT = """(() => {
    const text = (node) => [...node.childNodes].map((each) => each.nodeType === 3 ? each.data
        : ["STYLE", "SCRIPT"].includes(each.nodeName) ? "" : text(each) + (each.shadowRoot ? text(each.shadowRoot) : "")).join(" ");
    return text(document.body);
})()"""
# Wait until the page has not changed for a second, because curves move to their places.
SETTLED = """new Promise((done) => {
    let timer = setTimeout(done, 1000);
    new MutationObserver(() => { clearTimeout(timer); timer = setTimeout(done, 1000); })
        .observe(document.body, {subtree: true, childList: true, attributes: true});
    setTimeout(done, 10000);
})"""
# Closes MLflow's assistant, which opens by itself, and selects a few of its charts.
FEW_CHARTS = """(() => {
    document.querySelector('[data-component-id="mlflow.assistant.chat_panel.close"]')?.click();
    const field = document.querySelector('input[placeholder="Search metric charts"]');
    const charts = "^(loss|accuracy|val_loss|throughput|speedup|scaling_efficiency)$";
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, charts);
    field.dispatchEvent(new Event("input", {bubbles: true}));
})()"""
START_S = 60.0


def main() -> None:
    """Make every picture."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name:
        directory = Path(name)
        (directory / "examples").symlink_to(ROOT / "examples")  # the pages show the paths of the command line
        runs = [train(directory, world) for world in (1, 2, 3)]
        run_cli(directory, "report", *(run.name for run in runs), "--compare")
        sweep = tune(directory)
        run_cli(directory, "report", sweep.name)
        with Browser() as browser:
            report(browser, runs[1] / "report.html", "report")
            report(browser, runs[1] / "report.html", "report-phone", width=390, dark=True)
            report(browser, directory / "compare.html", "report-compare")
            report(browser, sweep / "report.html", "report-sweep")
            with tensorboard(directory) as url:
                tags = "loss%7Caccuracy%7Ctime/step"
                app(
                    browser,
                    f"{url}?tagFilter={tags}#timeseries",
                    "tensorboard",
                    shows("digits-2/tensorboard", "Smoothed", 4),
                )
            with tensorboard(sweep / "trials") as url:
                app(browser, f"{url}#hparams", "tensorboard-hparams", shows("00015/tensorboard", "val/loss", 1))
            with mlflow(directory) as url:
                drawn = "document.querySelectorAll('.js-plotly-plot').length > 5"
                runs = f"{url}#/experiments/1/runs?compareRunsMode=CHART"
                app(browser, runs, "mlflow", drawn, then=FEW_CHARTS, width=1500)


def train(directory: Path, world: int) -> Path:
    """Train examples/train.py on `world` processes and return the run directory."""
    run = directory / f"digits-{world}"
    arguments = ["--script", "examples/train.py", "--nproc-per-node", str(world), "--backend", "pytorch-ddp"]
    more = ["--global-batch-size", "96", "--gradient-clipping", "5", "--log-every-n-steps", "3", "--run-dir", run.name]
    run_cli(directory, "train", *arguments, *more, *TRACKED)
    return run


def tune(directory: Path) -> Path:
    """Run sixteen trials of the same script and return the directory of the sweep."""
    (directory / "space.yaml").write_text(SPACE)
    asked = ["--search-space", "space.yaml", "--num-samples", "16", "--metric", "val_loss", "--scheduler", "asha"]
    run_cli(directory, "tune", "--script", "examples/train.py", *asked, "--run-dir", "sweep", "--epochs", "9", *TRACKED)
    return directory / "sweep"


def run_cli(directory: Path, *arguments: str) -> None:
    subprocess.run([*CLI, *arguments], cwd=directory, check=True)


def report(browser: Browser, file: Path, name: str, *, width: int = 1280, dark: bool = False) -> None:
    """Save the whole page as docs/images/NAME.png. Fails if the page prints anything on its console."""
    page = browser.open(file, width=width, dark=dark)
    page.wait("document.body.dataset.drawn")
    page.screenshot(IMAGES / f"{name}.png")
    if page.problems:
        raise SystemExit(f"{name}: {page.problems}")


def app(browser: Browser, url: str, name: str, is_drawn: str, *, then: str = "", width: int = 1280) -> None:
    """Save a page of another program as docs/images/NAME.png.

    Args:
        is_drawn: JavaScript expression to wait for.
        then: JavaScript to run before the picture is taken.
    """
    page = browser.open(url, width=width, height=1000)
    page.wait(is_drawn)
    page.evaluate(SETTLED)
    if then:
        page.evaluate(then)
        page.evaluate(SETTLED)
    page.screenshot(IMAGES / f"{name}.png")


def shows(word: str, repeated: str, times: int) -> str:
    """Return an expression that is true once the page shows `word`, and `repeated` at least `times` times."""
    return f"((text) => text.includes({word!r}) && text.split({repeated!r}).length > {times})({TEXT})"


@contextlib.contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """Run TensorBoard on a directory and yield its URL."""
    argv = [
        "-m",
        "tensorboard.main",
        "--logdir",
        str(logs),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--load_fast",
        "false",
    ]
    with served(argv, r"at (http://127\.0\.0\.1:\d+/)") as url:
        yield url


@contextlib.contextmanager
def mlflow(directory: Path) -> Iterator[str]:
    """Run MLflow's server for the runs below a directory and yield its URL."""
    argv = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", "0", "--workers", "1"]
    with served(
        [*argv, "--backend-store-uri", f"sqlite:///{directory / 'mlflow.db'}"], r"on (http://127\.0\.0\.1:\d+)"
    ) as url:
        yield url + "/"


@contextlib.contextmanager
def served(argv: list[str], pattern: str) -> Iterator[str]:
    """Run `python ARGV` during the block. Yield what `pattern` matches in its output."""
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *argv], stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            yield _found(process, output.fileno(), pattern)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _found(process: subprocess.Popen[bytes], output: int, pattern: str) -> str:
    deadline = time.monotonic() + START_S
    while True:
        text = os.pread(output, 1 << 20, 0).decode(errors="replace")
        if found := re.search(pattern, text):
            return found[1]
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no page to be shown: {text[-2000:]}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
