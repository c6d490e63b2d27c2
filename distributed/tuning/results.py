"""Results of a trial: its checkpoints and its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed.checkpoints.manifest import list_checkpoints, read_manifest
from distributed.checkpoints.store import read_state


def checkpoint_of(run_dir: Path, step: Any = None) -> Path | None:
    """Return the checkpoint of `step` in a run directory, or the newest one. Return None if there is none."""
    sound = [
        info for info in list_checkpoints(run_dir / "checkpoints") if info.manifest is not None and not info.problem
    ]
    of_step = [info for info in sound if info.manifest is not None and info.manifest.step == step]
    return (of_step or sound)[-1].path if sound else None


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows that the newest checkpoint of a run contains."""
    newest = checkpoint_of(run_dir)
    if newest is None:
        return []
    rows = [
        dict(row) for row in read_state(newest)[0].rows if row["step"] > 0
    ]  # nothing was trained before the first update
    config = read_manifest(newest).config
    if any(config.get(name) is not None for name in ("validate_every_n_steps", "validate_every_s")):
        rows = [{**row, "validations": number + 1} for number, row in enumerate(rows)]
    return rows
