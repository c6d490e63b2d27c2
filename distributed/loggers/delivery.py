"""Deliver what a fit logs to the loggers of users and to trackers, in order, from a file and in a thread.

The training thread only appends lines to RUN/loggers/NAME.jsonl. RUN/loggers/NAME.json says how many of them were delivered, so
that the next attempt at the run goes on from there.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.callbacks import Callback
from distributed.checkpoints.durable import replace_text
from distributed.config.kinds import COUNT, TEXT, check_kinds
from distributed.config.reading import MAX_RECORD_BYTES, parse_json, read_bytes
from distributed.errors import ConfigError
from distributed.loggers.base import LoggedFit, Tracker, ValueTracker, hyperparameters
from distributed.loggers.logger import LoggedRun, Logger
from distributed.loggers.plugins import named_loggers
from distributed.loggers.spool import Spool, last_steps
from distributed.runs.directory import is_below
from distributed.runs.summary import was_interrupted
from distributed.state import LoggedMedia, TrainState

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # seconds that the end of a finished run waits for each call of a logger
_INTERRUPTED_S = 5.0  # seconds that it waits altogether if the run was stopped or failed
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between two attempts of a call that failed
_MEDIA_ATTEMPTS = 5  # of a call of log_media, after which it is left out
_WRITE_EVERY = 100  # number of deliveries after which the record is written at the latest


# A lock for each logger, so that its methods are called one after the other.
_turns: weakref.WeakKeyDictionary[Logger, threading.Lock] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class _Record:
    """The content of RUN/loggers/NAME.json."""

    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    delivered: int = 0  # number of bytes of the spool
    failures: int = 0  # of the next call, in all attempts

    @classmethod
    def read(cls, path: Path) -> _Record:
        """Return the record in the file, or a new one if there is none."""
        try:
            content = parse_json(read_bytes(path, MAX_RECORD_BYTES))
            check_kinds(content, {"id": TEXT, "delivered": COUNT, "failures": COUNT})
            return cls(content["id"], content["delivered"], content.get("failures", 0))
        except (OSError, ValueError, KeyError):
            return cls()


class Courier:
    """Deliver the entries of `spool` to `users` in a thread. `record_path` is the file that says how far it has come."""

    def __init__(
        self, users: Logger, run: LoggedRun, spool: Spool, record_path: Path, warn: Callable[[str], None]
    ) -> None:
        self._users, self._spool, self._record_path, self._warn = users, spool, record_path, warn
        self._record = _Record.read(record_path)
        self._record.delivered = min(self._record.delivered, spool.size)  # a crash may have lost the end of the spool
        self._position = self._record.delivered  # the number of bytes of the spool that were handed over
        # (time, position) of each call whose values the logger may still buffer, the oldest first
        self._buffered: collections.deque[tuple[float, int]] = collections.deque()
        self._run = dataclasses.replace(run, id=self._record.id)
        self._is_open = self._is_warned = self._is_refused = False
        self._wake, self._is_finishing, self._is_given_up = threading.Event(), threading.Event(), threading.Event()
        # A courier of an earlier fit may still be waiting for a call of the same logger.
        self._turn = _turns.setdefault(users, threading.Lock())
        self._moved_at = time.monotonic()  # when the newest call returned
        self._thread = threading.Thread(target=self._work, name=f"deliver-{record_path.stem}", daemon=True)

    @property
    def left(self) -> int:
        """The number of bytes of the spool that were not handed over."""
        return self._spool.size - self._position

    def start(self) -> None:
        self._write()
        self._thread.start()

    def wake(self) -> None:
        """Deliver what was appended to the spool."""
        self._wake.set()

    def finish(self, patience_s: float, limit_s: float = math.inf) -> bool:
        """Deliver the rest, and return whether all was delivered. Give up after `patience_s` for one call, or `limit_s` for all."""
        began = self._moved_at = time.monotonic()
        self._is_finishing.set()
        self._wake.set()
        while self._thread.is_alive():
            now = time.monotonic()
            if now - self._moved_at > patience_s or now - began > limit_s:
                self._is_given_up.set()
                return False
            self._thread.join(0.1)
        return self.left == 0

    # methods that run in the thread

    def _work(self) -> None:
        pause = _FIRST_PAUSE_S
        while not (self._is_given_up.is_set() or (self._is_finishing.is_set() and self.left == 0)):
            self._wake.clear()
            is_last = self._is_finishing.is_set()
            try:
                self._deliver()
                pause = _FIRST_PAUSE_S
                if not is_last:
                    self._wake.wait()
            except OSError as error:
                self._warn_once(error, "what is left is kept, and delivered later or by the next attempt")
                if is_last:
                    return
                self._is_finishing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _deliver(self) -> None:
        """Deliver all entries. Raises OSError if a call is to be repeated."""
        try:
            for number, (entry, end) in enumerate(self._spool.read(self._position), 1):
                with self._turn:
                    if self._is_given_up.is_set():  # the courier of a further fit goes on
                        return
                    self._hand_over(entry)
                if self._is_given_up.is_set():
                    return
                self._position, self._moved_at = end, time.monotonic()
                self._buffered.append((self._moved_at, end))
                if number % _WRITE_EVERY == 0:
                    self._write()
        finally:
            if not self._is_given_up.is_set():
                self._write()

    def _hand_over(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] == "start":
            self._is_refused = False
        if self._is_refused:
            return
        try:
            if not self._is_open:
                self._users.open(self._run)
                self._is_open = True
            self._call(entry)
            self._record.failures = 0
        except Exception as error:  # the user's code raises errors of any kind
            self._record.failures += 1
            # A file that cannot be read is not to stop everything after it.
            if isinstance(error, OSError) and not (
                entry["kind"] == "media" and self._record.failures >= _MEDIA_ATTEMPTS
            ):
                raise
            self._record.failures = 0
            self._is_refused = not self._is_open and not isinstance(error, OSError)
            logger.debug("not delivered", exc_info=error)
            then = (
                "this logger gets no values until the run is started again"
                if self._is_refused
                else "what it refuses is left out"
            )
            self._warn_once(error, then)

    def _call(self, entry: Mapping[str, Any]) -> None:
        kind = entry["kind"]
        if kind == "metrics":
            self._users.log_metrics(entry["step"], entry["values"])
        elif kind == "media":
            path = self._run.run_dir / entry["path"]
            if is_below(path, self._run.run_dir / "media"):  # it also may have been removed since
                named = (entry["name"], entry["of"], entry["step"], entry["rank"], str(path))
                self._users.log_media(LoggedMedia(*named, path.read_bytes()))
        elif kind == "end":
            self._is_open = False  # a further fit opens it again
            self._users.close(entry["status"])

    def _warn_once(self, error: Exception, then: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            reason = next(iter(str(error).splitlines()), "")
            self._warn(
                f"logger {self._record_path.stem} failed ({type(error).__name__}: {reason}): training continues, and {then}"
            )

    def _write(self) -> None:
        """Record up to where the logger has stored what it was given."""
        stored_at = time.monotonic() - (self._users.buffered_s if self._is_open else 0.0)
        while self._buffered and self._buffered[0][0] <= stored_at:
            self._record.delivered = self._buffered.popleft()[1]
        replace_text(self._record_path, json.dumps(dataclasses.asdict(self._record)) + "\n")


class Delivered(ValueTracker):
    """Write what a fit logs into the queue of one `Logger`. On the main process only."""

    def __init__(self, fit: LoggedFit, name: str, users: Logger) -> None:
        self._fit, self._name = fit, name
        run_dir = fit.run.path.absolute()
        directory = run_dir / "loggers"
        self._spool = Spool(directory / f"{name}.jsonl")
        entries = self._opened()
        self._logged = last_steps(entries)  # metric -> the last step that was logged, also in an earlier attempt
        self._media = {entry["path"] for entry in entries if entry["kind"] == "media"}
        run = LoggedRun("", run_dir.name, run_dir, hyperparameters(fit), fit.state.step)
        self._courier = Courier(users, run, self._spool, directory / f"{name}.json", self._warn)
        self._status = "failed"
        self._is_losing = False
        self._put({"kind": "start"})
        self._courier.start()

    def _opened(self) -> list[dict[str, Any]]:
        """Open the queue and return its entries. Raises ConfigError if it cannot be written."""
        path = self._spool.path
        try:
            path.parent.mkdir(exist_ok=True)
            return self._spool.open()
        except OSError as error:
            raise ConfigError(
                f"{path}, the queue of the logger {self._name}, cannot be written ({error.strerror}): free some space, or name another"
                " run directory with --run-dir"
            ) from None

    def record_media(self, state: TrainState, media: LoggedMedia) -> None:
        if media.path not in self._media:
            self._media.add(media.path)
            row = {field: getattr(media, field) for field in ("name", "step", "rank", "path")}
            self._put({"kind": "media", "of": media.kind, **row})

    def on_times(self, state: TrainState, seconds: Mapping[str, float]) -> None:
        self._metrics(state.step, {f"time/{name}": each for name, each in seconds.items() if name[:5] != "rank_"})

    def on_train_end(self, state: TrainState) -> None:
        self._status = "interrupted" if was_interrupted(state) else "finished"

    def on_error(self, state: TrainState, error: BaseException) -> None:
        self._status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def close(self) -> None:
        """Deliver the rest, as long as the logger answers."""
        self._put({"kind": "end", "status": self._status})
        limit = math.inf if self._status == "finished" else _INTERRUPTED_S
        if self._courier.finish(_PATIENCE_S, limit):
            self._spool.close()
        else:
            text = f"logger {self._name} has not taken everything: the rest is kept in {self._spool.path} for the next attempt"
            self._fit.on_event({"kind": "notice", "text": text})

    def _metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values, except those that an earlier attempt has logged for this step or a later one."""
        new = {name: float(value) for name, value in values.items() if step > self._logged.get(name, -1)}
        self._logged.update(dict.fromkeys(new, step))
        if new:
            self._put({"kind": "metrics", "step": step, "values": new})

    def _put(self, entry: Mapping[str, Any]) -> None:
        try:
            self._spool.append(entry)
        except OSError as error:  # with a full disk, lines are lost, but the run goes on
            if not self._is_losing:
                self._warn(f"{self._spool.path} cannot be written ({error.strerror}): lines are lost until it can be")
            self._is_losing = True
        self._courier.wake()

    def _warn(self, text: str) -> None:
        self._fit.on_event({"kind": "warning", "text": text})


def make(fit: LoggedFit) -> list[Callback]:
    """Return one callback for each logger that settings name or the user passed. Ranks other than the main one get empty ones."""
    users = _by_name(named_loggers(fit.merged), fit.loggers)
    if not fit.context.is_main_process:  # all ranks wait together for the end
        return [Tracker() for _ in users]
    return [Delivered(fit, name, each) for name, each in users.items()]


def _by_name(named: Mapping[str, Logger], objects: Sequence[Logger]) -> dict[str, Logger]:
    """Return the `named` loggers, and the `objects` by the names of their classes. Further ones of a name get a number."""
    found = dict(named)
    for each in objects:
        name = type(each).__name__
        number = next(n for n in itertools.count(1) if (name if n == 1 else f"{name}-{n}") not in found)
        found[name if number == 1 else f"{name}-{number}"] = each
    return found
