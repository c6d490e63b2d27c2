"""Runs samples of the documents as they stand in samples/: each in a directory of its own, with the names that it leaves undefined."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parent / "samples"


def run(sample: str, **names: Any) -> dict[str, Any]:
    """Execute `sample` with `names` defined; returns the names that it leaves."""
    path = SAMPLES / sample
    namespace = {"__name__": "sample", "__file__": str(path), **names}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace


def run_all(cases: Mapping[str, Callable[[], None]], out: Path) -> None:
    """Call each case in its own directory below `out`. What failed is written to a file of this rank, for the test."""
    failed = {}
    for name, case in cases.items():
        place = out / name.replace("/", "-")
        place.mkdir(exist_ok=True)
        os.chdir(place)
        try:
            case()
        except Exception:
            failed[name] = traceback.format_exc()
    (out / f"failed-{os.environ.get('RANK') or os.environ.get('OMPI_COMM_WORLD_RANK', 0)}.json").write_text(
        json.dumps(failed)
    )
