"""The samples of 000 and 001 that launch from Python, one after the other: each starts two processes that note their arguments."""

from __future__ import annotations

import json
from pathlib import Path

from tests.seeds.running import run

NOTES = "import os, sys\nopen(f'{sys.argv[0]}.{os.environ[\"RANK\"]}', 'w').write(repr((sys.argv[1:], os.environ['WORLD_SIZE'])))\n"


def launched(sample: str) -> dict[str, object]:
    Path("train.py").write_text(NOTES)
    left = run(sample)
    notes = [Path(f"train.py.{rank}") for rank in (0, 1)]
    seen = [note.read_text() for note in notes]
    for note in notes:
        note.unlink()
    return {"seen": seen, "exit_code": left.get("exit_code")}


SAMPLES = ("000/launch_training.py", "001/launch_training.py", "001/launcher.py")
print(json.dumps({sample: launched(sample) for sample in SAMPLES}))
