"""Send the entries of the spool from a separate thread, so that a slow or absent server does not slow training down."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from distributed.loggers._mlflow.run import Entry, Kept, Later, Refused, TrackedRun, grouped
from distributed.loggers._mlflow.spool import RunRecord
from distributed.loggers._mlflow.tracking_uri import shown
from distributed.loggers.spool import Spool

_EVERY_S = 5.0  # seconds between two sendings: a request costs about ten milliseconds of a core
_LATER_S = 0.5  # seconds until the sender looks for the run of the sweep again
_LINES = 5000  # lines of the spool in memory at once
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0
_REFUSALS_SHOWN = 3  # warnings about refused entries in an attempt
_PATIENCE_S = 10.0  # seconds that `finish` waits for each answer
_BYTES_PER_S = 5e6  # `finish` waits longer for files: as long as a connection of this speed needs
_OF_FILES = ("artifact", "model")  # kinds of entries for which MLflow uses another store, which may fail by itself


class _FilesLeft(Exception):
    """Artifacts could not be stored; everything else was sent."""


class _Gone(Exception):
    """The run was deleted at MLflow."""


class Sender:
    """Send the entries of one fit in a thread. Call `start` when the fit begins and `finish` when it ends."""

    def __init__(
        self,
        run_dir: Path,
        record: RunRecord,
        spool: Spool,
        uri: str,
        warn: Callable[[str], None],
        is_training: bool = True,
    ) -> None:
        """Create the sender.

        `warn` is called at most three times about entries that the store refuses and, during training, once about a store
        that does not answer. After training, the caller shows `cause`.
        """
        self._run_dir, self._record, self._spool, self._uri, self._warn = run_dir, record, spool, uri, warn
        self.is_open = threading.Event()  # the run's id is known, or the first attempt failed
        self._wake, self._is_finishing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow-sender", daemon=True)
        self._run: TrackedRun | None = None
        self._is_warned = not is_training
        self._num_refused = 0
        self._failed: list[Entry] = []  # entries with files that could not be stored in this sending
        self.cause = ""  # why the newest sending failed
        self._patience_s = _PATIENCE_S
        self._patient_until, self._give_up_at = 0.0, math.inf

    @property
    def uri(self) -> str:
        """The tracking URI."""
        return self._uri

    @property
    def run_id(self) -> str | None:
        """The id of the run, or None until the store has answered."""
        return None if self._run is None else self._run.id

    @property
    def left(self) -> int:
        """The number of bytes of the spool that have not been sent."""
        return self._spool.size - self._record.sent

    def start(self) -> None:
        self._thread.start()

    def finish(self, patience_s: float | None = None, limit_s: float = math.inf) -> bool:
        """Send the entries that are left. Give up if one answer takes longer than `patience_s`, or all take longer than `limit_s`.

        Return whether everything was sent. If the sender gave up, its thread may still be running.
        """
        self._patience_s = _PATIENCE_S if patience_s is None else patience_s
        self._give_up_at = time.monotonic() + limit_s
        self._be_patient()
        self._is_finishing.set()
        self._wake.set()
        while self._thread.is_alive() and (rest := self._rest_s()) > 0:
            self._thread.join(min(rest, 1.0))
        return not self._thread.is_alive() and self.left == 0

    def warn_once(self, reason: str) -> None:
        """Show the one line about a store that does not answer."""
        if not self._is_warned:
            self._is_warned = True
            self._warn(
                f"MLflow at {shown(self._uri)} {reason}: training continues, and records are kept in {self._spool.path} and sent"
                f" when it answers; 'distributed mlflow-sync {self._run_dir}' sends what is left at the end"
            )

    def _be_patient(self, num_bytes: int = 0) -> None:
        """Extend the deadline by the time that the answer to a request with `num_bytes` of files may take."""
        self._patient_until = time.monotonic() + self._patience_s + num_bytes / _BYTES_PER_S

    def _rest_s(self) -> float:
        return min(self._patient_until, self._give_up_at) - time.monotonic()

    # methods that run in the thread

    def _work(self) -> None:
        """Send entries until `finish` was called and everything was sent, or a last attempt to send has failed."""
        pause = _FIRST_PAUSE_S
        while not (self._is_finishing.is_set() and self.left == 0):
            is_last = self._is_finishing.is_set()
            try:
                self._send()
            except _Gone:  # the next attempt, or mlflow-sync, sends everything to another run
                self._warn_of_deletion()
                break
            except Later:
                if self._is_finishing.is_set():
                    break
                self._sleep(_LATER_S)
            except Exception as error:
                # A store and its libraries raise errors of any kind. Keep the entries and try again.
                self._warn_of_failure(error)
                if is_last or (self._is_finishing.is_set() and not isinstance(error, _FilesLeft)):
                    break
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                pause = _FIRST_PAUSE_S
                self._sleep(_EVERY_S)

    def _warn_of_failure(self, error: Exception) -> None:
        logging.getLogger(__name__).debug("not sent", exc_info=error)
        self.cause = _short(error)
        what = ", ".join(map(_what, self._failed)) if isinstance(error, _FilesLeft) else "what is logged"
        self.warn_once(f"does not accept {what} ({self.cause})")
        self.is_open.set()

    def _sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until `finish` is called. Do not sleep after that."""
        if not self._is_finishing.is_set():
            self._wake.wait(seconds)

    def _send(self) -> None:
        """Find or create the run if that was not done before, then send all entries of the spool."""
        if self._run is None:
            run = TrackedRun(self._run_dir, self._record, self._uri, self._be_patient)
            if run.open():
                self._record.sent = 0
            self._record.write(self._run_dir)
            self._run = run
            self.is_open.set()
        self._failed = []
        cause: Exception | None = None
        while batch := list(self._spool.read(self._record.sent, _LINES)):
            if all(entry in self._failed for entry, _ in batch):
                raise _FilesLeft from cause
            for entries, end in grouped(batch):
                cause = self._log_or_put_back(self._run, entries) or cause
                self._record.sent = end
                self._record.write(self._run_dir)

    def _log_or_put_back(self, run: TrackedRun, entries: Sequence[Entry]) -> Exception | None:
        """Log entries. Return the error if files cannot be stored, else None.

        The entry of such files is appended to the spool again, so that everything else is sent first. The files are tried
        once in a sending.
        """
        entry, cause = entries[0], None
        if entry not in self._failed:
            try:
                self._log(run, entries)
                return None
            except Exception as error:  # of any kind, as in `_work`
                if entry["kind"] not in _OF_FILES or not run.is_there():
                    raise
                cause = error
                self._failed.append(entry)
        self._spool.append(entry)
        return cause

    def _log(self, run: TrackedRun, entries: Sequence[Entry]) -> None:
        """Log entries. If MLflow refuses them, log their parts one by one and leave out what is refused."""
        try:
            run.log(entries)
        except Kept as error:
            self._leave_out(entries[0], error)
        except Refused as error:
            if not run.is_there():
                raise _Gone from error
            parts = _parts(entries)
            if not parts:
                self._leave_out(entries[0], error)
            for each in parts:  # send them one by one, because MLflow may refuse only one of them
                self._log(run, [each])

    def _leave_out(self, entry: Entry, error: Refused) -> None:
        self._num_refused += 1
        if self._num_refused <= _REFUSALS_SHOWN:
            more = ", and so is anything else that it refuses" if self._num_refused == _REFUSALS_SHOWN else ""
            self._warn(f"MLflow at {shown(self._uri)} refuses {_what(entry)} ({_short(error)}): it is left out{more}")

    def _warn_of_deletion(self) -> None:
        """Warn once that the run was deleted. The thread then ends."""
        self.cause = f"its run {self.run_id} was deleted"
        if not self._is_warned:
            self._is_warned = True
            self._warn(
                f"MLflow at {shown(self._uri)} no longer has the run {self.run_id}, which was deleted: training continues, and records"
                f" are kept in {self._spool.path}; 'distributed mlflow-sync {self._run_dir}' sends all of them to a new run"
            )


def _parts(entries: Sequence[Entry]) -> list[Entry]:
    """Return `entries` as a list, or a single entry split into one entry per value, or [] if it cannot be split."""
    if len(entries) > 1:
        return list(entries)
    (entry,) = entries
    values = entry.get("values", {})
    return [{**entry, "values": {name: value}} for name, value in values.items()] if len(values) > 1 else []


def _what(entry: Entry) -> str:
    names = ", ".join(entry.get("values", ())) or entry.get("path") or entry.get("name") or entry.get("status")
    return f"{entry['kind']} {names}"


def _short(error: BaseException) -> str:
    """Return the innermost cause of `error` in one short line. The outer errors are about retries and connection pools."""
    while error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        error = error.__cause__ or error.__context__ or error
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 160 else text[:157] + "..."
