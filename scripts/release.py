"""Build the wheel and the source archive into dist/, and train the demo with the wheel alone. Uploads nothing.

    python scripts/release.py EXTRAS ARGUMENTS      (`make release` passes those of `make demo`)

EXTRAS are installed with the wheel. ARGUMENTS are the arguments of Python for the demo. The build tools and the wheel
are installed into two clean environments outside of the checkout, with the versions of constraints.txt. The demo's
script comes from the source archive. Uses only the standard library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WHERE = "import distributed; print(distributed.__file__)"


def main(extras: str, *demo: str) -> int:
    """Build, check and try out the archives. Return the exit code."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="release-") as scratch:
        wheel, source = build(Path(scratch, "tools"))
        python = install(wheel, extras, source, Path(scratch, "user"))
        run(python, *demo, cwd=python.parents[2])
    sys.stdout.write(f"{wheel.name} and {source.name} in {DIST}, tried out in {time.monotonic() - began:.0f} s\n")
    return 0


def build(directory: Path) -> tuple[Path, Path]:
    """Return the new wheel and source archive in dist/, after twine has checked their metadata."""
    shutil.rmtree(DIST, ignore_errors=True)
    python = environment(directory, "build", "twine")
    run(python, "-m", "build", "--outdir", DIST, ROOT)
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(python, "-m", "twine", "check", "--strict", wheel, source)
    return wheel, source


def install(wheel: Path, extras: str, source: Path, directory: Path) -> Path:
    """Return the Python of a clean environment with `wheel`. `directory` gets the examples of `source`."""
    python = environment(directory, f"{wheel}[{extras}]")
    with tarfile.open(source) as archive:
        archive.extractall(directory, filter="data")
    shutil.copytree(directory / source.name.removesuffix(".tar.gz") / "examples", directory / "examples")
    imported = run(python, "-c", WHERE, cwd=directory, stdout=subprocess.PIPE).stdout.strip()
    if not Path(imported).is_relative_to(directory / "venv"):
        raise SystemExit(f"the demo would run with {imported} and not with the wheel")
    return python


def environment(directory: Path, *packages: str) -> Path:
    """Return the Python of a new virtual environment with `packages` in the versions of constraints.txt."""
    venv.create(directory / "venv", with_pip=True)
    python = directory / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-compile", *packages)
    return python


def run(*command: str | Path, **where: object) -> subprocess.CompletedProcess[str]:
    """Run `command` without this process' PYTHONPATH. Exit the program if the command fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = [str(word) for word in command]
    done = subprocess.run(words, env=env, text=True, **where)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode} of: {' '.join(words)}")
    return done


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
