"""Tests for a machine with a GPU: `make test-gpu`. The ordinary suite does not collect them."""

from __future__ import annotations

import os
import sys

import pytest

if not os.environ.get("GPU_SUITE"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.set_sync_debug_mode("default")  # also if a test failed in another mode


@pytest.fixture
def gpu():
    """Skip a test in a rehearsal if it needs what a CPU lacks, for example `gpu("CUDA's allocator")`."""

    def needs(what: str) -> None:
        if os.environ.get("GPU_REHEARSAL") == "cpu":
            pytest.skip(f"rehearsal on CPUs: needs {what}")

    return needs
