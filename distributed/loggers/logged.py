"""Keep what the user's code logs on this rank until the next reduction; how loggers record it belongs in their own files."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from distributed.callbacks.media import Media
from distributed.errors import ConfigError, nearest
from distributed.metrics.monitor import PREFIX, check_names
from distributed.state import MAX, RATE, SEPARATOR, SUM, LoggedMedia, StepResult

Average = tuple[str, Any, float, float]  # as in `StepResult`
_REDUCTIONS = ("mean", "sum", "max")
_PER_SECOND = "per second"  # the reduction of `log_rate`, which `log` does not take
# Prefixes of names that loggers use themselves.
_TAKEN = (PREFIX, "best_", "time/", "train/", "val/", "logged/", "media/", "weights/", "gradients/")
_LONGEST = 180  # letters of a name in a file name
_receivers: list[Logged] = []  # of the fits and evaluations that run in this process, the innermost last


@dataclasses.dataclass
class _Held:
    """Media that were logged, until they are recorded."""

    name: str
    media: Media
    rank: int | None
    step: int | None = None


class Logged:
    """Values that the user's code logs on this rank, until they join the result of a step. Ranks may log different names.

    With `reserves`, names that rows of a run and loggers use themselves are refused.
    """

    def __init__(self, *, reserves: bool = True) -> None:
        self._reserves = reserves
        self._num_samples: int | None = None
        self.is_repeated: Callable[[], bool] = lambda: (
            False
        )  # whether the code that logs runs a second time, set by the engine
        self._refusal: str | None = None
        self._pending: list[Average] = []
        self._reductions: dict[str, str] = {}  # of each name that was logged
        self._result: StepResult | None = None  # the newest result that got values
        self._rank, self._taken = 0, frozenset[str]()
        self._takes_media = False
        self._media: list[_Held] = []
        self._numbers: Counter[tuple[str, int]] = Counter()  # media of each full name and step

    def begin(
        self,
        rank: int,
        taken: Iterable[str],
        *,
        takes_media: bool = False,
        earlier: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """Begin a fit on `rank` in which the names `taken` are those of metrics.

        Media are dropped unless `takes_media` is true. `earlier` has the numbers of media that an earlier fit of the run has
        recorded, by full name and step.
        """
        self._num_samples, self._pending, self._reductions = None, [], {}
        self._media, self._numbers = [], Counter(earlier)
        self._rank, self._taken, self._takes_media = rank, frozenset(taken), takes_media

    @contextlib.contextmanager
    def evaluating(self, rank: int, taken: Iterable[str]) -> Iterator[None]:
        """Begin an evaluation for the `with` block. A fit that runs it in a hook then continues with its own logged values."""
        before = dict(vars(self))
        self.begin(rank, taken)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Forget at the end of the `with` block what was logged in it."""
        before = dict(vars(self))
        self._pending, self._media, self._takes_media, self._result = [], [], False, None
        try:
            yield
        finally:
            vars(self).update(before)

    @property
    def num_samples(self) -> int | None:
        """The samples of the micro-batch whose step runs, or None outside of a step."""
        return self._num_samples

    def weigh(self, num_samples: int | None) -> None:
        """Set the weight of values that are logged from now on: the samples of the micro-batch that begins. 0 discards the values.

        None ends the step. Each value that is logged outside of a step counts once.
        """
        self._num_samples = num_samples

    @property
    def is_pending(self) -> bool:
        """Return whether something was logged that no result holds, or that is not recorded yet."""
        return bool(self._pending) or bool(self._media)

    def log(self, name: str, value: Any, reduce: str = "mean", *, on_every_rank: bool = False) -> None:
        """Keep a value, as `Trainer.log` says. Never waits for the device or for another rank."""
        if self._refusal is not None:
            raise ConfigError(f"log({name!r}, ...) {self._refusal}")
        if self._reductions.get(name) != reduce:
            self._check(name, reduce)
        if self._num_samples == 0 or self.is_repeated():  # a sample that is run again counts elsewhere
            return
        if isinstance(value, Media):
            self._hold(name, value, reduce, on_every_rank)
            return
        number = _number(name, value)
        self._reductions[name] = reduce
        key = f"{name}/rank_{self._rank}" if on_every_rank else name
        if reduce == "mean":
            weight = float(1 if self._num_samples is None else self._num_samples)
            self._pending.append((key, number, weight, weight))
        else:
            self._pending.append((key + (SUM if reduce == "sum" else MAX), number, 1.0, 1.0))

    def log_rate(self, name: str, amount: Any) -> None:
        """Keep an amount of this rank, to be logged per second of training, as `FitContext.log_rate` says."""
        if self._reductions.get(name) != _PER_SECOND:
            self._check(name, _PER_SECOND, (_PER_SECOND,))
        self._reductions[name] = _PER_SECOND
        self._pending.append((name + RATE, _number(name, amount), 1.0, 1.0))

    def forget(self, names: Collection[str]) -> None:
        """Drop the values called `names` that no result holds."""
        self._pending = [each for each in self._pending if each[0].partition(SEPARATOR)[0] not in names]

    def attach(self, result: StepResult, step: int | None = None) -> None:
        """Move the values into `result`, that of update `step` or of no update.

        Raises ConfigError if the step reports a metric of the same name, or if there is a rate but no update.
        """
        for held in self._media:
            held.step = step if held.step is None else held.step
        pending, self._pending = self._pending, []
        is_more = result is self._result  # a step and then `on_step_end` may log the same name
        reported = set() if is_more else {name for name, *_ in result.averages}
        for name, *average in pending:
            plain, _, _ = name.partition(SEPARATOR)
            if step is None and name.endswith(RATE):
                raise ConfigError(f"log_rate({plain!r}, ...) was called outside of an update: call it in on_step_end")
            if plain in reported:
                raise ConfigError(f"log({plain!r}, ...) has the name of a metric of the same step: rename one of them")
            # The sums of a step are added up, so each value that is reduced by "max" needs a name of its own.
            key = f"{name}{len(result.averages)}" if name.endswith(MAX) else name
            result.averages.append((key, *average))
        self._result = result

    def take_media(self, step: int) -> list[LoggedMedia]:
        """Return the media since the last call, encoded. The host waits for the device here. `step` is the newest step."""
        held, self._media = self._media, []
        return [self._encoded(each, step if each.step is None else each.step) for each in held]

    def _hold(self, name: str, media: Media, reduce: str, on_every_rank: bool) -> None:
        if reduce != "mean":
            raise ConfigError(
                f"log({name!r}, {type(media).__name__}(...), reduce={reduce!r}) cannot be reduced: drop reduce"
            )
        if len(quote(name, safe="")) > _LONGEST:
            raise ConfigError(
                f"log({name[:20]!r}..., ...) has a name too long for a file: give it at most {_LONGEST} letters"
            )
        held = media.held()  # checks it, also where it is not kept
        if self._takes_media and (on_every_rank or self._rank == 0):
            self._media.append(_Held(name, held, self._rank if on_every_rank else None))

    def _encoded(self, held: _Held, step: int) -> LoggedMedia:
        key = (held.name if held.rank is None else f"{held.name}/rank_{held.rank}", step)
        number = self._numbers[key]
        self._numbers[key] += 1
        words = [quote(held.name, safe=""), f"{step:08d}"]
        words += ([] if held.rank is None else [f"rank_{held.rank}"]) + ([f"{number + 1}"] if number else [])
        path = f"media/{'-'.join(words)}.{held.media.suffix}"
        return LoggedMedia(held.name, held.media.kind, step, held.rank, path, held.media.encoded())

    @contextlib.contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Refuse to log inside the `with` block, for `reason`."""
        self._refusal = reason
        try:
            yield
        finally:
            self._refusal = None

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Keep nothing of what is logged inside the `with` block."""
        self._num_samples = 0
        try:
            yield
        finally:
            self._num_samples = None

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Set aside what has been logged until the end of the `with` block."""
        before, self._pending = self._pending, []
        yield
        self._pending = before + self._pending

    def _check(self, name: str, reduce: str, known: tuple[str, ...] = _REDUCTIONS) -> None:
        """Raise ConfigError for a name or a reduction that cannot be logged."""
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise ConfigError(f"log({name!r}, ...) needs a name in words: write log('codebook_usage', value)")
        if reduce not in known:
            raise ConfigError(
                f"log({name!r}, reduce={reduce!r}) is not a way to reduce{nearest(str(reduce), known)}: choose one of {', '.join(known)}"
            )
        if self._reserves:
            check_names([name])
        if self._reserves and (name in self._taken or name.startswith(_TAKEN)):
            raise ConfigError(f"log({name!r}, ...) has a name that a metric of the trainer uses: give it another name")
        if (before := self._reductions.get(name)) is not None:
            raise ConfigError(
                f"log({name!r}, reduce={reduce!r}) was called with reduce={before!r} before: use one of them, or two names"
            )


def log(name: str, value: Any, reduce: str = "mean", *, on_every_rank: bool = False) -> None:
    """Log a value to the innermost fit or evaluation of this process.

    A step that was sent to workers may hold a copy of its trainer, so it does not matter on which trainer `log` is called.
    """
    if not _receivers:
        raise ConfigError(
            f"log({name!r}, ...) only works while fit() or evaluate() runs: call it in training_step or in a hook of a callback"
        )
    _receivers[-1].log(name, value, reduce, on_every_rank=on_every_rank)


@contextlib.contextmanager
def receiving(logged: Logged) -> Iterator[None]:
    """Let `log` reach `logged` inside the `with` block."""
    _receivers.append(logged)
    try:
        yield
    finally:
        _receivers.pop()


def _number(name: str, value: Any) -> Any:
    """Return `value` as a float, or as a copy on its device if it is a torch tensor. Raises ConfigError if it is not a number."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        is_one = math.prod(getattr(value, "shape", (0,))) == 1
    except TypeError:  # a dimension that is not known
        is_one = False
    if hasattr(value, "full_tensor"):
        raise ConfigError(f"log({name!r}, ...) got a DTensor: pass value.full_tensor(), on every rank")
    if not is_one or getattr(getattr(value, "dtype", None), "is_complex", False):
        what = f"of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
        ways = "pass value.mean()" if hasattr(value, "mean") else "pass a number"
        if isinstance(value, str):
            ways += ", or distributed.loggers.Text(value)"
        elif len(getattr(value, "shape", ())) in (2, 3):
            ways += ", or distributed.loggers.Image(value)"
        raise ConfigError(f"log({name!r}, ...) got a {type(value).__name__} {what}, not a number: {ways}")
    if hasattr(value, "detach"):
        return value.detach().clone().reshape(())  # a copy, because the user's code may change the tensor in place
    return float(value.item() if hasattr(value, "item") else value)
