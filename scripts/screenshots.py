"""Makes the pictures of the documentation from real runs, in a headless Chromium: docs/images/*.png. `make screenshots`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Browser

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CLI = [sys.executable, "-m", "distributed.cli"]


def main() -> None:
    """Every picture anew."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name:
        directory = Path(name)
        (directory / "examples").symlink_to(ROOT / "examples")  # the pages show paths as they were typed
        runs = [train(directory, world) for world in (1, 2, 3)]
        subprocess.run([*CLI, "report", *(run.name for run in runs), "--compare"], cwd=directory, check=True)
        with Browser() as browser:
            picture(browser, runs[1] / "report.html", "report")
            picture(browser, runs[1] / "report.html", "report-phone", width=390, dark=True)
            picture(browser, directory / "compare.html", "report-compare")


def train(directory: Path, world: int) -> Path:
    """The digits of examples/train.py on `world` processes; returns the run directory."""
    run = directory / f"digits-{world}"
    arguments = ["--script", "examples/train.py", "--nproc-per-node", str(world), "--backend", "pytorch-ddp"]
    more = ["--global-batch-size", "96", "--gradient-clipping", "5", "--log-every-n-steps", "3", "--run-dir", run.name]
    subprocess.run([*CLI, "train", *arguments, *more], cwd=directory, check=True)
    return run


def picture(browser: Browser, file: Path, name: str, *, width: int = 1280, dark: bool = False) -> None:
    """The whole page as docs/images/NAME.png. Fails where the page says anything on its console."""
    page = browser.open(file, width=width, dark=dark)
    page.wait("document.body.dataset.drawn")
    page.screenshot(IMAGES / f"{name}.png")
    if page.problems:
        raise SystemExit(f"{name}: {page.problems}")


if __name__ == "__main__":
    main()
