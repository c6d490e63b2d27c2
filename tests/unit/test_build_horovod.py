"""scripts/build_horovod.py: which wheel fits, what is missing, what a failed build says. Nothing is built."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_horovod.py"
VERSIONS = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}


@pytest.fixture
def build(monkeypatch, tmp_path):
    """The script as a module, with a cache and temporary files of its own, beside one torch and TensorFlow."""
    spec = importlib.util.spec_from_file_location("build_horovod", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    versions = dict(VERSIONS)
    monkeypatch.setattr(module, "version", versions.get)
    monkeypatch.setattr(module, "tensorflow", lambda: versions["tensorflow"])
    module.versions = versions
    return module


def test_a_wheel_is_kept_under_all_that_it_was_built_for(build, monkeypatch, tmp_path):
    keys = {build.directory([]), build.directory(["tensorflow"]), build.directory(["mpi", "tensorflow"])}
    build.versions["tensorflow"] = "2.22.0"
    assert build.directory([]) in keys  # one without TensorFlow fits any
    keys |= {build.directory(["tensorflow"])}
    build.versions["torch"] = "2.14.0+cpu"
    keys |= {build.directory([])}
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    keys |= {build.directory([])}
    assert len(keys) == 6
    monkeypatch.setenv("HOROVOD_WITH_PYTORCH", "1")  # which every build sets
    assert build.directory([]) in keys
    assert {key.parent for key in keys} == {tmp_path / "cache" / "distributed-trainer" / "horovod"}
    assert all(sys.implementation.cache_tag in key.name for key in keys)


def test_the_wheel_of_an_earlier_build_is_taken_and_that_of_another_torch_is_not(build, monkeypatch):
    assert build.kept([]) is None
    wheel = build.directory([]) / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    taken = []
    monkeypatch.setattr(build, "installed", lambda: None)
    monkeypatch.setattr(build, "install", taken.append)
    monkeypatch.setattr(build, "build", lambda features: Path("built"))

    assert build.main([]) == 0
    build.versions["torch"] = "2.14.0+cpu"
    assert build.main([]) == 0

    assert taken == [wheel, Path("built")]


FAKES = {
    "whole": ("__version__ = '0.28.1'", "def mpi_built(): return 1", {"mpi"}),
    "of another torch": ("__version__ = '0.28.1'", "raise ImportError('undefined symbol')", None),
    "of another version": ("__version__ = '0.28.0'", "def mpi_built(): return 1", None),
}


@pytest.mark.parametrize("name", FAKES)
def test_a_horovod_counts_where_it_loads(build, monkeypatch, tmp_path, name):
    package, library, features = FAKES[name]
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").write_text(package)
    (tmp_path / "horovod" / "torch" / "__init__.py").write_text(library)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert build.installed() == features


def test_a_horovod_that_is_here_is_built_again_only_for_what_it_lacks(build, monkeypatch, capsys):
    built = []
    monkeypatch.setattr(build, "installed", lambda: {"mpi"})
    monkeypatch.setattr(build, "absent", lambda feature: None)
    monkeypatch.setattr(build, "install", lambda wheel: None)
    monkeypatch.setattr(build, "build", built.append)

    assert build.main(["--with", "mpi"]) == 0
    assert capsys.readouterr().out == "horovod 0.28.1 is here for torch 2.13.0+cpu: Gloo, MPI\n"
    assert build.main(["--with", "mpi", "tensorflow"]) == 0
    assert built == [["mpi", "tensorflow"]]


def test_without_a_compiler_it_says_what_to_install_or_is_left_out(build, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "installed", lambda: None)
    missing = (
        "there is no c++ and no cmake and no make on PATH: install g++, make and cmake (apt.txt lists the packages)"
    )

    assert build.main([]) == 3
    assert capsys.readouterr().err == f"error: {missing}\n"
    assert build.main(["--or-skip"]) == 0
    assert capsys.readouterr().out == f"horovod is not built: {missing}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--with", "mxnet"], "MXNet is retired"),
        (["--with", "rdma"], "'rdma' is not a part of Horovod that this builds: choose from mpi, tensorflow"),
        (["--with", "mpi"], "there is no mpicxx: install libopenmpi-dev and openmpi-bin"),
    ],
)
def test_what_cannot_be_built_is_one_line(build, monkeypatch, capsys, tmp_path, arguments, said):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(arguments) == 3
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_without_torch_there_is_nothing_to_build_it_for(build, capsys):
    build.versions["torch"] = None
    assert build.main([]) == 3
    assert "run 'make' first" in capsys.readouterr().err


def test_each_failed_build_keeps_its_whole_log_and_says_the_first_error(build, monkeypatch, tmp_path):
    compiler = tmp_path / "python"
    compiler.write_text("#!/bin/sh\necho begins\necho 'x.cc:1: error: no such type'\necho ends\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(compiler))
    logs = []
    for _ in range(2):
        with pytest.raises(
            build.Refused, match=r"did not build: x\.cc:1: error: no such type \(whole log: "
        ) as refused:
            build.compile_wheel(tmp_path, [], tmp_path / "build.log")
        logs.append(Path(re.search(r"whole log: (.*)\)", str(refused.value))[1]))
    assert logs[0] != logs[1]
    assert [log.read_text() for log in logs] == ["begins\nx.cc:1: error: no such type\nends\n"] * 2


def test_what_killed_builds_left_is_removed_and_a_build_at_work_is_not(build, tmp_path):
    old, young = tmp_path / ".building-1", tmp_path / ".building-2"
    for each in (old, young):
        each.mkdir()
        (each / "build.log").touch()
    os.utime(old, (0, time.time() - 2 * build.ABANDONED_S))

    build.remove_abandoned(tmp_path)

    assert not old.exists() and young.exists()


@pytest.mark.parametrize(("debug", "symbols"), [("0", "-g0"), ("1", "-g")])
def test_the_compiler_is_told_what_headers_of_today_need(debug, symbols):
    command = [
        str(SCRIPT.with_name("horovod_cxx.sh")),
        "-O3",
        "-g",
        "-std=c++14",
        "-c",
        "a b.cc",
        "-o",
        "x/xla_mpi_ops.cc",
    ]
    environment = {**os.environ, "HOROVOD_REAL_CXX": "echo", "HOROVOD_DEBUG": debug}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"-O3 {symbols} -std=c++20 -c a b.cc -o -UTENSORFLOW_VERSION x/xla_mpi_ops.cc\n"
