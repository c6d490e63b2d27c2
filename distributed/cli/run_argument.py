"""Find the run that an argument of a command names."""

from __future__ import annotations

from pathlib import Path


def run_path(given: Path) -> Path:
    """Return the path of a run: `given`, or `runs/given` if only that exists, as `distributed runs` names the runs in ./runs."""
    in_runs = "runs" / given
    return in_runs if not given.exists() and in_runs.exists() else given


def run_paths(given: list[Path]) -> list[Path]:
    """Return `run_path` of each of several runs."""
    return [run_path(each) for each in given]
