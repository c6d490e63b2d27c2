"""Read the output of workers in the launcher."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.launching.output import WorkerOutput
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory


def test_a_connection_that_breaks_ends_the_output_of_its_worker_only(tmp_path: Path) -> None:
    """On a Ray cluster the pipes are connections to other machines."""
    channel, launcher = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends: list[Mapping[str, Any]] = []
    output = WorkerOutput(RunDirectory(tmp_path), Display(live=False, verbose=False), channel, ends.append)
    here, worker = socket.socketpair()
    here.send(b"never read")  # so that the close below is a reset
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    output.attach(0, 1, here.detach(), out, err)
    output.start()

    worker.close()
    launcher.send(json.dumps({"op": "exit", "local_rank": 0, "status": -9, "time": 1.0}).encode())
    launcher.shutdown(socket.SHUT_WR)

    output._thread.join(10)
    for fd in (out_end, err_end):
        os.close(fd)
    channel.close()
    launcher.close()
    assert not output._thread.is_alive() and [each["op"] for each in ends] == ["exit"]
