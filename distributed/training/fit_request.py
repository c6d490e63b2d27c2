"""FitRequest: what a fit does besides training the model."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FitRequest:
    """What a fit does besides training the model. The defaults are those of `Trainer.fit`; a finder of `finders` asks for less.

    A request applies only in the process in which it was given. If the fit runs in workers, each worker creates a Trainer with the
    default request, unless the job of the workers sets another one, as `SizeFit` in `finders/batch_size.py` does.

    Attributes:
        is_shown: whether progress, notices and warnings are shown.
        reports_epochs: whether the row of each finished epoch is passed to the trial, or to Ray Tune.
        is_resumable: whether a fit in workers continues from the checkpoints of an earlier attempt of its trial, and says after a
            signal how to resume.
        keeps_checkpoints: whether checkpoints are written.
        explains_out_of_memory: whether an error for lack of memory is replaced by one that names the rank and what to change.
        directory_name: the name of a directory inside the run directory of the first Trainer of this process. The fit uses it as
            its run directory; a second fit with the same name uses `NAME-2`. If None, the fit gets the next run directory of
            this process: that of the first Trainer, then `fit-2`, `fit-3` and so on inside it.
    """

    is_shown: bool = True
    reports_epochs: bool = True
    is_resumable: bool = True
    keeps_checkpoints: bool = True
    explains_out_of_memory: bool = True
    directory_name: str | None = None
