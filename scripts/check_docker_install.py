"""Check what the Dockerfiles install without a container engine. Each set is installed in a clean virtual environment.

    python scripts/check_docker_install.py [torch horovod tensorflow all] [--variant cuda] [--dry-run] [--cpu-index URL]

For each set the script copies what the Dockerfile copies, runs its RUN line, imports every backend of the set and runs
`distributed doctor`, which the image starts with and which must find nothing wrong. Debian packages are those of this
machine (apt.txt). Python is the one that runs this script. With --dry-run pip only resolves: the CUDA sets are several
gigabytes. Uses only the standard library.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = ("single", "pytorch-ddp", "fsdp")
# The backends of each image. The one for Horovod has torch's backends too.
BACKENDS = {
    "torch": (*TORCH, "deepspeed", "ray"),
    "horovod": (*TORCH, "horovod"),
    "tensorflow": (*TORCH, "tensorflow"),
    "all": (*TORCH, "deepspeed", "ray", "horovod", "tensorflow"),
}
IMPORTS = """
import importlib, os, sys
from distributed.backends import backend_class
from distributed.config.registry import REGISTRY
os.environ.update(DS_ACCELERATOR="cpu", KERAS_BACKEND="tensorflow" if "tensorflow" in sys.argv else "torch", TF_CPP_MIN_LOG_LEVEL="3")
for name in sys.argv[1:]:
    backend_class(name)
    for library in REGISTRY[name].requires:
        importlib.import_module(library)
if "horovod" in sys.argv:
    import horovod.torch
import distributed
print(distributed.__file__)
"""


class Failed(Exception):
    """A command that failed, in one line."""


def main(argv: list[str] | None = None) -> int:
    """Check the given sets, or all of them, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(BACKENDS)} (default: all of them)")
    parser.add_argument("--variant", choices=("cpu", "cuda"), default="cpu", help="the build argument VARIANT")
    parser.add_argument("--dry-run", action="store_true", help="let pip resolve, install nothing")
    parser.add_argument("--cpu-index", metavar="URL", help="in the place of the Dockerfile's CPU_INDEX; may be empty")
    given = parser.parse_args(argv)
    if unknown := sorted(set(given.sets) - set(BACKENDS)):
        parser.error(f"there is no Dockerfile for {', '.join(unknown)}: choose of {', '.join(BACKENDS)}")
    code = 0
    for name in given.sets or list(BACKENDS):
        began = time.monotonic()
        try:
            found = check(name, given.variant, is_dry=given.dry_run, cpu_index=given.cpu_index)
        except Failed as error:
            found, code = f"FAILED: {error}", 1
        sys.stdout.write(f"{name}, {given.variant}: {found} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return code


def check(name: str, variant: str, *, is_dry: bool, cpu_index: str | None) -> str:
    """Install one set in a clean directory and return the result as text. Raises Failed."""
    text = joined((ROOT / "docker" / f"{name}.Dockerfile").read_text())
    with tempfile.TemporaryDirectory(prefix=f"image-{name}-") as scratch:
        source, environment = Path(scratch, "src"), Path(scratch, "venv")
        copy(text, source)
        venv.create(environment, with_pip=True)
        variables = build_variables(text, environment, variant, cpu_index)
        command = install_command(text, is_dry=is_dry)
        output = run(["sh", "-euc", command], source, variables)
        if is_dry:
            return resolved(output)
        home = Path(scratch, "home")
        home.mkdir()
        python = str(environment / "bin" / "python")
        where = run([python, "-c", IMPORTS, *BACKENDS[name]], home, variables).splitlines()[-1]
        if not Path(where).is_relative_to(environment):
            raise Failed(f"the package came from {where} and not from the image's environment")
        run([str(environment / "bin" / "distributed"), "doctor"], home, variables)
        size = sum(file.lstat().st_size for file in environment.rglob("*") if file.is_file())
        return f"{', '.join(BACKENDS[name])} import, doctor is content, {size / 1e9:.1f} GB"


def joined(text: str) -> str:
    """Return the Dockerfile with each instruction on one line."""
    return text.replace("\\\n", " ")


def copy(text: str, target: Path) -> None:
    """Copy what the build stage copies from the checkout."""
    target.mkdir()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M):
        *sources, place = line.split()
        for source in sources:
            into = target / (Path(source).name if place.endswith("/") else place)
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, into)


def build_variables(text: str, environment: Path, variant: str, cpu_index: str | None) -> dict[str, str]:
    """Return the environment of the build stage: its arguments, with the virtual environment first on PATH."""
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    index = arguments["CPU_INDEX"] if cpu_index is None else cpu_index
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    return {**kept, "VARIANT": variant, "CPU_INDEX": index, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def install_command(text: str, *, is_dry: bool) -> str:
    """Return the RUN line that installs Python packages, or only its pip command if pip is only to resolve."""
    (line,) = (line for line in re.findall(r"^RUN (.+)$", text, re.M) if "install.sh" in line)
    return f"{line.partition('&&')[0].strip()} --dry-run" if is_dry else line


def run(command: list[str], cwd: Path, variables: dict[str, str]) -> str:
    """Run a command and return its output. Raises Failed with the last line of the output if it fails."""
    done = subprocess.run(command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout)
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
        raise Failed(f"{command[0]} ended with {done.returncode}: {last}")
    return done.stdout


def resolved(output: str) -> str:
    """Return how many packages pip would install, and which versions of torch and TensorFlow are among them."""
    (line,) = re.findall(r"^Would install (.+)$", output, re.M)
    packages = line.split()
    engines = [each for each in packages if re.match(r"(torch|tensorflow|tensorflow_cpu|tensorflow-cpu)-\d", each)]
    cuda = sum(each.startswith(("nvidia", "cuda")) for each in packages)
    return f"{len(packages)} packages resolve, {cuda} of them CUDA's: {', '.join(engines)}"


if __name__ == "__main__":
    sys.exit(main())
