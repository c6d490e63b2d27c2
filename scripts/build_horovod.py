"""Build Horovod from its unedited source for the torch of this environment, keep the wheel, and install it.

    python scripts/build_horovod.py [--with mpi tensorflow] [--optional mpi tensorflow] [--or-skip]

Without options it builds torch and Gloo support only, which takes about two minutes on two cores. A wheel fits only the
versions of Python, torch and TensorFlow that it was built for, so it is kept under a name that contains them, outside
of the checkout: $XDG_CACHE_HOME/distributed-trainer/horovod. A second call, or a second checkout, installs it in
seconds. Variables of Horovod's own build (HOROVOD_GPU_OPERATIONS=NCCL, ...) are passed on and are part of the name.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

VERSION = "0.28.1"
SOURCE = f"horovod=={VERSION} --hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0\n"
# packages that its build and its use need
NEEDED = ("cloudpickle", "packaging", "psutil", "PyYAML", "setuptools", "wheel")
FEATURES = ("mpi", "tensorflow")
ABANDONED_S = 24 * 3600  # no build takes this long
WRAPPER = Path(__file__).with_name("horovod_cxx.sh")
# Prints what the built library supports. It runs in a process of its own, because a wrong library may crash.
PROBE = """
import json, horovod, horovod.torch as hvd
features = ["mpi"] if hvd.mpi_built() else []
try:
    import horovod.tensorflow.mpi_ops
    features.append("tensorflow")
except (ImportError, AttributeError):
    pass
print(json.dumps([horovod.__version__, features]))
"""


class Refused(Exception):
    """Why Horovod cannot be built, in one line."""


def main(argv: list[str] | None = None) -> int:
    """Build the wheel or take the kept one, install it, and check that it works. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--with", dest="wanted", nargs="*", default=[], metavar="mpi|tensorflow", help="build these too"
    )
    parser.add_argument(
        "--optional", nargs="*", default=[], metavar="mpi|tensorflow", help="these too, where they are here"
    )
    parser.add_argument("--or-skip", action="store_true", help="without a compiler say so and succeed")
    given = parser.parse_args(argv)
    try:
        features = choose(given.wanted, given.optional)
        found = installed()
        if found is not None and set(features) <= found:
            say(f"horovod {VERSION} is here for torch {version('torch')}: {words(found)}")
            return 0
        if (missing := missing_tools()) and given.or_skip and kept(features) is None:
            say(f"horovod is not built: {missing}")
            return 0
        install(kept(features) or build(features))
        return 0
    except Refused as reason:
        sys.stderr.write(f"error: {reason}\n")
        return 3


def choose(wanted: list[str], optional: list[str]) -> list[str]:
    """Return the features to build. Raises Refused for one that is unknown or cannot be built here."""
    for name in (*wanted, *optional):
        if name == "mxnet":
            raise Refused("MXNet is retired and the last one needs a Python of 2022: use torch or TensorFlow models")
        if name not in FEATURES:
            raise Refused(f"{name!r} is not a part of Horovod that this builds: choose from {', '.join(FEATURES)}")
    if version("torch") is None:
        raise Refused(
            f"torch is not installed in {sys.prefix}: run 'make' first, Horovod is built for the torch that is there"
        )
    for name in wanted:
        if reason := absent(name):
            raise Refused(f"cannot build Horovod with {name}: {reason}")
    for name in optional:
        if reason := absent(name):
            say(f"Horovod without {name}: {reason}")
    return [name for name in FEATURES if name in wanted or (name in optional and not absent(name))]


def absent(feature: str) -> str | None:
    """Return why `feature` cannot be built here, or None."""
    if feature == "tensorflow":
        return None if tensorflow() else f"tensorflow is not installed in {sys.prefix}"
    return None if shutil.which("mpicxx") else "there is no mpicxx: install libopenmpi-dev and openmpi-bin (apt.txt)"


def missing_tools() -> str | None:
    """Return a sentence with the build tools that this machine lacks, or None."""
    absent_tools = [tool for tool in (compiler(), "cmake", "make") if shutil.which(tool) is None]
    if not absent_tools:
        return None
    return (
        f"there is no {' and no '.join(absent_tools)} on PATH: install g++, make and cmake (apt.txt lists the packages)"
    )


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def tensorflow() -> str | None:
    """Return the version of TensorFlow, whatever the name of its distribution is."""
    if importlib.util.find_spec("tensorflow") is None:
        return None
    names = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly")
    return next((found for name in names if (found := version(name))), None)


def installed() -> set[str] | None:
    """Return the features of the installed Horovod, or None if none of this version loads."""
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=quiet())
    if probe.returncode:
        return None
    found, features = json.loads(probe.stdout.splitlines()[-1])
    return set(features) if found == VERSION else None


def quiet() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def kept(features: list[str]) -> Path | None:
    """Return the wheel of an earlier build for the same versions, or None."""
    return next(iter(sorted(directory(features).glob("*.whl"))), None)


def directory(features: list[str]) -> Path:
    """Return the directory for the wheel that fits the installed versions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = [VERSION, sysconfig.get_config_var("SOABI"), f"torch-{version('torch')}"]
    parts += [f"tensorflow-{tensorflow()}"] if "tensorflow" in features else []
    parts += ["mpi"] if "mpi" in features else []
    own = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_") and name not in recipe([])}
    parts += [hashlib.sha256(json.dumps(sorted(own.items())).encode()).hexdigest()[:8]] if own else []
    return cache / "distributed-trainer" / "horovod" / "-".join(str(part) for part in parts)


def recipe(features: list[str]) -> dict[str, str]:
    """Return the variables for Horovod's own build."""
    choice = {name: f"HOROVOD_WITH{'' if name in features else 'OUT'}_{name.upper()}" for name in FEATURES}
    return {
        **dict.fromkeys(choice.values(), "1"),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_REAL_CXX": compiler(),
        "CXX": str(WRAPPER),
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}",
    }


def build(features: list[str]) -> Path:
    """Build the wheel, keep it and return its path. Raises Refused with the compiler's first error."""
    if missing := missing_tools():
        raise Refused(missing)
    pip("install", "--quiet", *NEEDED)
    say(f"building horovod {VERSION} for torch {version('torch')}: {words(features)}; this takes minutes")
    began, target = time.monotonic(), directory(features)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as temporary:
        log = Path(temporary) / "build.log"
        (Path(temporary) / "source.txt").write_text(SOURCE)
        compile_wheel(Path(temporary), features, log)
        target.mkdir(exist_ok=True)
        for wheel in Path(temporary).glob("*.whl"):
            wheel.replace(target / wheel.name)
    say(f"built in {time.monotonic() - began:.0f} s, kept in {target}")
    wheel_or_none = kept(features)
    assert wheel_or_none is not None
    return wheel_or_none


def remove_abandoned(cache: Path) -> None:
    """Remove directories of killed builds. A directory that is younger than a day may still be in use."""
    for left in cache.glob(".building-*"):
        if time.time() - left.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)


def compile_wheel(where: Path, features: list[str], log: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--no-binary", "horovod",
        "--require-hashes", "-r", str(where / "source.txt"), "-w", str(where),
    ]  # fmt: skip
    # The build runs `python` and `mpicxx` from PATH to find out about them.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, **recipe(features), "PATH": path}
    environment.pop("PIP_CONSTRAINT", None)  # pip refuses hashes if constraints are set
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment).returncode
    if code == 0:
        return
    text = log.read_text(errors="replace")
    # a unique name, because another user's file may exist
    handle, told = tempfile.mkstemp(prefix="horovod-build-", suffix=".log")
    with os.fdopen(handle, "w") as copy:
        copy.write(text)
    first = next(
        (line.strip() for line in text.splitlines() if "error:" in line.lower()), "no error line in its output"
    )
    raise Refused(f"Horovod {VERSION} did not build: {first} (whole log: {told})")


def install(wheel: Path) -> None:
    """Install the wheel into this environment and check that it loads. Raises Refused."""
    pip("install", "--quiet", *NEEDED)
    pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    found = installed()
    if found is None:
        raise Refused(f"the wheel {wheel} does not load here: remove it and run this again")
    say(f"installed horovod {VERSION} for torch {version('torch')}: {words(found)}")


def pip(*arguments: str) -> None:
    code = subprocess.run([sys.executable, "-m", "pip", *arguments]).returncode
    if code:
        raise Refused(f"pip {' '.join(arguments)} failed with code {code}: see above")


def words(features: object) -> str:
    """Return the features of a Horovod as text."""
    assert isinstance(features, (set, list))
    names = {"mpi": "MPI", "tensorflow": f"TensorFlow {tensorflow()}"}
    return ", ".join(["Gloo", *(names[name] for name in FEATURES if name in features)])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
