"""A Jupyter kernel that runs the cells of a test."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import uuid
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import MARK, clean_environment, marked

QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of nbclient and zmq


class Kernel:
    """A kernel that runs cells one by one; all that it starts is found by a mark in the environment."""

    def __init__(self, directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._notebook = nbformat.v4.new_notebook()
        self.client = NotebookClient(
            self._notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(directory)}}
        )

    def __enter__(self) -> Kernel:
        self.client.create_kernel_manager()
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._wait(self.client.async_start_new_kernel(env=clean_environment(**{MARK: self.mark})))
        self._wait(self.client.async_start_new_kernel_client())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self.client._async_cleanup_kernel())
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        asyncio.set_event_loop(None)
        self._loop.close()

    def _wait(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def run(self, source: str, while_it_runs: Any = None) -> str:
        """The cell's text output. `while_it_runs()` is called in a thread meanwhile. Raises CellExecutionError."""
        cell = nbformat.v4.new_code_cell(textwrap.dedent(source))
        self._notebook.cells.append(cell)

        async def both() -> None:
            other = asyncio.to_thread(while_it_runs) if while_it_runs else asyncio.sleep(0)
            await asyncio.gather(self.client.async_execute_cell(cell, len(self._notebook.cells) - 1), other)

        self._wait(both())
        return self.output

    @property
    def output(self) -> str:
        """What the newest cell printed."""
        return "".join(out.get("text", "") for out in self._notebook.cells[-1].outputs)

    @property
    def outputs(self) -> list[Any]:
        """All of the newest cell."""
        return list(self._notebook.cells[-1].outputs)

    @property
    def bars(self) -> list[str]:
        """The HTML of each output of the newest cell that can be replaced."""
        outputs = self._notebook.cells[-1].outputs
        return [out.data["text/html"] for out in outputs if out.output_type == "display_data"]

    def alive(self) -> list[int]:
        """The kernel and its descendants."""
        return marked(self.mark)

    @property
    def pid(self) -> int:
        return int(self.client.km.provisioner.pid)  # type: ignore[union-attr]
