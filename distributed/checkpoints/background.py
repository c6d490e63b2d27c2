"""Write a checkpoint in a thread of each rank, and commit it when all ranks have written, without a collective."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distributed.checkpoints.agreement import described, rebuilt
from distributed.checkpoints.digests import FileRecord
from distributed.errors import DistributedError, TrainingError
from distributed.state import WorkerContext

_PAUSE_S = 0.01
Records = Mapping[str, FileRecord]  # of files, by their names in the checkpoint


class BackgroundSave:
    """Run one save in a thread. Every rank creates one of these objects for each save.

    The ranks tell the main process through `store` how their writes ended. The thread of the main process commits if all of
    them have written, and tells the other ranks.

    Args:
        store: the store that all ranks share (see `World.key_value_store`), or None in a world of one.
        context: the rank of this process.
        key: prefix of the keys in the store that only this save uses.
        write: writes the files of this rank and returns their records. Called in the thread.
        commit: commits the checkpoint, from the records of all ranks. Called in the thread of the main process.
        when_over: called in the thread of the main process when the save has been committed or has failed.
    """

    def __init__(
        self,
        store: Any,
        context: WorkerContext,
        key: str,
        *,
        write: Callable[[], Records],
        commit: Callable[[Records], None],
        when_over: Callable[[], None],
    ) -> None:
        self._store, self._context, self._key = store, context, key
        self._write, self._commit, self._when_over = write, commit, when_over
        self._given_up = threading.Event()
        self._outcome: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="distributed-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save is over. Every rank must call it. Not a collective.

        Raises OSError or DistributedError, on every rank, if the save has failed.
        """
        self._thread.join()
        outcome = self._outcome if self._context.is_main_process else self._read("over")
        if "kind" in outcome:
            raise rebuilt(outcome, int(outcome["rank"]))

    def give_up(self) -> None:
        """End the save on this rank, because training has failed: commit only if all ranks have written already."""
        self._given_up.set()
        self._thread.join()

    def _run(self) -> None:
        answer = self._answer_of(lambda: {name: record.to_json() for name, record in self._write().items()})
        if self._store is not None:
            self._store.set(f"{self._key}/{self._context.rank}", json.dumps(answer))
        if not self._context.is_main_process:
            return
        try:
            self._outcome = self._committed([answer, *map(self._read, range(1, self._context.world_size))])
        except RuntimeError:  # the store's host has ended, or training has failed: the run ends too
            self._outcome = {**described(TrainingError("the save was given up")), "rank": 0}
            return
        if self._store is not None:
            self._store.set(f"{self._key}/over", json.dumps(self._outcome))
        self._when_over()

    def _committed(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """Commit if all ranks have written. Return {} or the failure."""
        failed = next((answer for answer in answers if "kind" in answer), None)
        if failed is not None:
            return failed
        records = {name: FileRecord.from_json(record) for answer in answers for name, record in answer["value"].items()}
        answer = self._answer_of(lambda: self._commit(records))
        return answer if "kind" in answer else {}

    def _answer_of(self, action: Callable[[], Any]) -> dict[str, Any]:
        """Return {"value": result of `action`}, or its error. An error that is not caught would be lost with the thread."""
        try:
            return {"value": action()}
        except (OSError, DistributedError) as error:
            raised: OSError | DistributedError = error
        except Exception as error:
            raised = TrainingError(f"the checkpoint could not be saved: {type(error).__name__}: {error}")
        return {**described(raised), "rank": self._context.rank}

    def _read(self, name: str | int) -> dict[str, Any]:
        """Wait for a rank's message. Raises RuntimeError if the save is given up first."""
        key = f"{self._key}/{name}"
        while not self._store.check([key]):
            if self._given_up.wait(_PAUSE_S):
                raise RuntimeError("given up")
        content: dict[str, Any] = json.loads(self._store.get(key))
        return content
