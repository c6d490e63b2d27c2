"""report.html, a page with the curves, times, events and settings of runs or of a sweep; what is logged in a run belongs in `loggers`."""

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
    """Return the page of one run or sweep, or of several runs side by side.

    This function only reads files, so the runs may still be running.

    Args:
        paths: run directories, or the directory of one sweep.

    Raises:
        ConfigError: a path is not a run, or a sweep is combined with other paths.
        ResourceError: bokeh is not installed.
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
    """Write the page of `paths` to `output` atomically.

    Args:
        paths: as for `report_text`.
        output: the file to write. An existing file is replaced.

    Returns:
        `output`.

    Raises:
        ConfigError: `output` cannot be written. The errors of `report_text` can be raised too.
    """
    text = report_text(paths)
    stage = output.with_name(f".{output.name}.tmp")
    try:
        stage.write_text(text, encoding="utf-8", errors="backslashreplace")
        stage.replace(output)
    except OSError as error:
        raise ConfigError(f"{str(output)!r} cannot be written ({error.strerror}): name another with --output") from None
    finally:
        with contextlib.suppress(OSError):  # if the directory cannot be written, `stage` does not exist
            stage.unlink(missing_ok=True)
    return output


def write_reports_at_end(run: RunDirectory, notice: Callable[[str], None]) -> None:
    """Write RUN/report.html, and the report of each further Trainer of the script, if they have metrics.

    Errors do not fail the run: `notice` is called with one line for each.
    """
    from distributed.report.page import is_bokeh_here

    having = [path for path in (run.path, *sorted(run.path.glob("fit-*"))) if _has_metrics(RunDirectory(path))]
    if having and not is_bokeh_here():
        notice(
            f"no {FILE}, which needs bokeh: pip install 'distributed-trainer[report]', then 'distributed report {run.path}'"
        )
        return
    for path in having:
        try:
            write_report([path], path / FILE)
        except DistributedError as error:
            notice(f"no {FILE}: {error}")
        except Exception as error:  # a bug in the report must not fail a finished run
            logger.debug("report of %s", path, exc_info=True)
            notice(
                f"no {FILE} of {path} ({type(error).__name__}: {error}): run 'distributed report {path}' for the whole error"
            )


def _has_metrics(run: RunDirectory) -> bool:
    """Return whether a Trainer wrote its first log line to the run directory."""
    return run.metrics.is_file() and run.metrics.stat().st_size > 0
