"""`distributed doctor` tells a usable machine from one that is not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import socket
from pathlib import Path

import pytest

from distributed.cli import doctor
from distributed.config.registry import REGISTRY


def test_usable_machine_exits_0_writes_nothing_and_loads_no_framework_in_this_process(run_python, tmp_path):
    code = "import sys; from distributed.cli.doctor import doctor; doctor(); print('torch' in sys.modules)"

    done = run_python(["-c", code], cwd=tmp_path)

    assert done.returncode == 0 and done.stdout.endswith("\nFalse\n"), done.output
    assert re.search(r"^ok +all-reduce +two gloo processes: 1 MB in [\d.]+ ms", done.stdout, re.M), done.output
    for name in REGISTRY:
        assert re.search(rf"^ok +{name} ", done.stdout, re.M), done.output
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_without_torch_it_says_the_command_and_exits_3(run_python):
    code = (
        "import sys, typer; sys.modules['torch'] = None\n"
        "from distributed.cli.doctor import doctor\n"
        "try: doctor()\n"
        "except typer.Exit as end: sys.exit(end.exit_code)"
    )

    done = run_python(["-c", code])

    assert done.returncode == 3, done.output
    assert "no torch: run pip install 'distributed-trainer[torch]'" in done.stdout
    assert re.search(r"^bad +all-reduce +not tried", done.stdout, re.M)
    assert "not usable: single, pytorch-ddp, all-reduce" in done.stdout


def test_a_library_that_was_built_for_another_torch_is_not_called_usable(tmp_path, monkeypatch):
    (tmp_path / "built_for_another.py").write_text("raise ImportError('x.so: undefined symbol: _ZN3c104impl')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    entry = dataclasses.replace(REGISTRY["horovod"], requires=(), compiled="built_for_another")
    assert doctor.check_backend(entry, is_default=False) == doctor.Check(
        "horovod", doctor.MISSING,
        "built_for_another does not load (ImportError: x.so: undefined symbol: _ZN3c104impl):"
        " run 'make horovod' (builds it for the installed torch)",
    )  # fmt: skip


def test_dask_clash_is_named(tmp_path, monkeypatch):
    info = tmp_path / "distributed-2026.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: distributed\nVersion: 2026.1.0\n")
    assert doctor.check_dask().status == doctor.OK
    monkeypatch.syspath_prepend(tmp_path)

    check = doctor.check_dask()

    assert check.status == doctor.BAD
    assert "'distributed' 2026.1.0" in check.detail
    assert "pip uninstall distributed" in check.detail


def test_our_own_package_as_users_install_it_is_no_clash(monkeypatch):
    """Not editable, it is the distribution that brings a package `distributed`."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"distributed": ["distributed-trainer"]})
    assert doctor.check_dask().status == doctor.OK


def test_missing_library_of_an_optional_backend_is_no_failure():
    entry = dataclasses.replace(REGISTRY["single"], name="other", requires=("no_such_engine",), install="make other")

    assert doctor.check_backend(entry, is_default=True).status == doctor.BAD
    assert doctor.check_backend(entry, is_default=False) == doctor.Check(
        "other", doctor.MISSING, "no no_such_engine: run make other"
    )


def test_directory_that_takes_no_file_is_bad():
    check = doctor.check_run_directory(Path("/proc/runs"))

    assert check.status == doctor.BAD
    assert "/proc cannot be written" in check.detail


def test_closed_loopback_is_bad(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)

    assert doctor.check_port().status == doctor.BAD


@pytest.mark.parametrize(
    ("probe", "limit_s", "detail"),
    [
        ("raise SystemExit('no transport here')", 60.0, "rank 0 ended with 1: no transport here"),
        ("import signal; signal.pause()", 0.3, "two gloo processes were not finished after 0.3 s"),
    ],
)
def test_all_reduce_that_fails_or_hangs_is_bad(monkeypatch, probe, limit_s, detail):
    monkeypatch.setattr(doctor, "_PROBE", probe)
    monkeypatch.setattr(doctor, "PROBE_LIMIT_S", limit_s)

    assert doctor.check_all_reduce() == doctor.Check("all-reduce", doctor.BAD, detail)


def test_a_node_0_that_does_not_answer_is_named(run_cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        flags = ["--num-nodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        done = run_cli(["doctor", *flags, "--start-timeout", "0.5"])

    assert done.returncode == 3, done.output
    assert f"error: node 0 did not answer at 127.0.0.1:{port} within 0.5 s (start_timeout)" in done.stderr
    assert re.search(r"^bad +nodes +they did not join each other", done.stdout, re.M), done.output
