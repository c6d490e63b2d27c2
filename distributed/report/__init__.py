"""report.html: curves, time split, events and settings of a run, of several, or of a sweep. What is logged while a run lasts belongs to `loggers`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from distributed.errors import ConfigError, DistributedError
from distributed.runs.directory import RunDirectory

logger = logging.getLogger(__name__)

FILE = "report.html"


def report_text(paths: Sequence[Path]) -> str:
    """The page of one run or sweep, or of several runs side by side. Reads files only: the run may still go on.

    Raises ConfigError for what is no run, ResourceError without bokeh.
    """
    from distributed.report import sweep, tables
    from distributed.report.runs import read_run, read_runs

    sweeps = [path for path in paths if (path / sweep.FILE).is_file()]
    if not sweeps:
        return tables.run_page(read_run(paths[0])) if len(paths) == 1 else tables.compare_page(read_runs(paths))
    if len(paths) > 1:
        raise ConfigError(f"{str(sweeps[0])!r} is a sweep, which has a page of its own: name it alone, or runs only")
    return tables.sweep_page(sweep.read_sweep(paths[0]))


def write_report(paths: Sequence[Path], output: Path) -> Path:
    """Write the page of `paths` to `output`, whole or not at all; returns it. Raises as `report_text`."""
    text = report_text(paths)
    stage = output.with_name(f".{output.name}.tmp")
    try:
        stage.write_text(text, encoding="utf-8")
        stage.replace(output)
    except OSError as error:
        raise ConfigError(f"{str(output)!r} cannot be written ({error.strerror}): name another with --output") from None
    finally:
        with contextlib.suppress(OSError):  # where nothing can be written nothing was left
            stage.unlink(missing_ok=True)
    return output


def write_reports_at_end(run: RunDirectory, say: Callable[[str], None]) -> None:
    """RUN/report.html, and that of each further Trainer of its script, where they have metrics.

    Nothing that goes wrong here fails a run: `say` gets one line.
    """
    from distributed.report.page import is_bokeh_here

    having = [path for path in (run.path, *sorted(run.path.glob("fit-*"))) if _has_metrics(RunDirectory(path))]
    if having and not is_bokeh_here():
        say(
            f"no {FILE}, which needs bokeh: pip install 'distributed-trainer[report]', then 'distributed report {run.path}'"
        )
        return
    for path in having:
        try:
            write_report([path], path / FILE)
        except DistributedError as error:
            say(f"no {FILE}: {error}")
        except Exception as error:  # a fault of ours in what is only a picture of the run
            logger.debug("report of %s", path, exc_info=True)
            say(f"no {FILE} of {path} ({type(error).__name__}: {error}): 'distributed report {path}' says more")


def _has_metrics(run: RunDirectory) -> bool:
    """Whether a Trainer came as far as its first log line there."""
    return run.metrics.is_file() and run.metrics.stat().st_size > 0
