"""Log a fit to Weights & Biases, through the queue of `delivery`. Its library is loaded when the run opens."""

from __future__ import annotations

import csv
import html
import io
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.config.libraries import check_not_hidden, is_installed
from distributed.errors import ResourceError
from distributed.loggers.logger import LoggedRun, Logger
from distributed.runs.directory import script_name
from distributed.state import LoggedMedia

logger = logging.getLogger(__name__)

_ENDS_S = 20.0  # seconds within which wandb's service ends a run


class WandbLogger(Logger):
    """One run at Weights & Biases for each run directory.

    W&B's variables apply (`WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY`). If no project is set, the name of the
    script is used. Without an API key the run is kept offline, because a question on the terminal would stop training.

    Workaround (wandb 0.31, no upstream issue known; may go when a call of wandb stores its values before it returns): its service
    writes the file of a run, and sends values to the server, every 15 seconds, and loses the rest if the process that logs is
    killed. The file of an offline run is written more often. The calls since then are repeated after a kill.
    """

    def check(self) -> None:
        """Raise ResourceError if the library is missing. Imports nothing of it."""
        if not is_installed("wandb"):
            raise ResourceError(
                "loggers='wandb' needs wandb, which is not installed: run pip install 'distributed-trainer[wandb]'"
            )
        check_not_hidden("wandb")

    def open(self, run: LoggedRun) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        if mode == "offline" and "WANDB_MODE" not in os.environ:
            logger.warning(
                "wandb knows no API key: the run is kept in %s/wandb; run 'wandb login' before the next one, and 'wandb sync' for this one",
                run.run_dir,
            )
        self.buffered_s = 2.0 if mode == "offline" else 30.0
        self._run: Any = _opened(
            project=os.environ.get("WANDB_PROJECT") or Path(script_name()).stem, id=run.id, name=run.name, dir=str(run.run_dir),
            config=dict(run.hyperparameters), mode=mode, resume="allow" if mode == "online" else None, reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_transaction_log_flush_interval=1.0),
        )  # fmt: skip
        # Rows do not come in the order of steps: media are recorded at the next log line. So the step is a value of its own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_media(self, media: LoggedMedia) -> None:
        self._run.log({"step": media.step, media.full_name: _converted(media)})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _opened(**arguments: Any) -> Any:
    """Return what `wandb.init` returns.

    Workaround (wandb 0.31, wandb/wandb#10833; may go when `finish` of a run waits for the service): the service may not have ended the
    run of an earlier fit yet, and refuses the same run then. The wait is here, because `delivery` does not repeat a call that fails at
    the end of a fit, and a short fit would end without its values.
    """
    import wandb

    deadline = time.monotonic() + _ENDS_S
    while True:
        try:
            return wandb.init(**arguments)
        except Exception as error:  # the service's error has no public class; every other one is raised
            if not str(error).endswith("is in use") or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _converted(media: LoggedMedia) -> Any:
    """Return the object of W&B for an image, a text or the like."""
    import wandb

    if media.kind == "audio":
        return wandb.Audio(media.path)
    if media.kind == "text":
        return wandb.Html(f"<pre>{html.escape(media.content.decode())}</pre>", inject=False)
    if media.kind == "table":
        head, *rows = csv.reader(io.StringIO(media.content.decode()))
        return wandb.Table(columns=head, data=rows)
    return wandb.Image(media.path)
