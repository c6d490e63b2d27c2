"""The launcher process of a plain script or a notebook: `python main.py REQUEST PARENT`, where `-` stands for standard input.

The launcher process runs this file by its path and not with -m. The caller's working directory is therefore not on
`sys.path` unless the request has it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the launch request and exit with the exit code of the run."""
    from distributed.errors import DistributedError
    from distributed.launching.forkserver import launch
    from distributed.launching.request import LaunchRequest
    from distributed.runs.processes import die_with_parent, leave

    die_with_parent(int(sys.argv[2]))
    try:
        code = launch(LaunchRequest.from_json(_request_text(sys.argv[1])))
    except DistributedError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    leave(code)


def _request_text(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    with open(name, encoding="utf-8") as file:
        return file.read()


if __name__ == "__main__":
    # sys.path[0] is this directory, and its files would hide modules of the same name. Replace it by the package's parent.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
