"""Write, send and show the results of a fit at its end, besides its checkpoint."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

from distributed.config.registry import backend_entry
from distributed.launching.request import launched_by, link
from distributed.loggers.base import Tracker
from distributed.report import write_reports_at_end
from distributed.runs.processes import REGROUP_SIGNAL
from distributed.runs.remote import push_at_end
from distributed.runs.summary import read_result, resume_lines, resume_setting, was_interrupted, write_result
from distributed.state import OnEvent, TrainState, WorkerContext

if TYPE_CHECKING:
    from distributed.training.session import Fit, FitSession


def end_of(state: TrainState, world_size: int) -> tuple[str, str, dict[str, Any]]:
    """Return the status that result.json gets at the end of a fit, and the event with its details."""
    if state.stop_reason == f"signal {int(REGROUP_SIGNAL)}":  # the launcher starts other workers, and the run goes on
        return "running", "regrouped", {"world_size": world_size}
    if was_interrupted(state):
        return "interrupted", "preempted", {"signal": int(str(state.stop_reason).split()[1])}
    return "finished", "finished", {"epoch": state.epoch_in_words, "stop_reason": state.stop_reason}


def deliver(session: FitSession, fit: Fit, on_event: OnEvent) -> None:
    """Send the result and its checkpoint to the other nodes, where the process that called `fit` reads them. A collective."""
    request = launched_by()
    is_shared = backend_entry(session.setup.plan.backend).places_workers  # its nodes share the run directory
    if request is None or request.payload is None or request.num_nodes == 1 or is_shared:
        return
    try:
        here = fit.store.deliver(session.checkpoint) if session.checkpoint is not None else None
    except OSError as error:
        on_event({"kind": "warning", "text": f"the weights could not be sent to the other nodes: {error}"})
        return
    content = session.files.on_main(lambda: read_result(fit.run.path / "result.json"))
    if content is not None and not session.context.is_main_process and session.context.local_rank == 0:
        where = None if here is None else os.path.relpath(here, fit.run.path)
        write_result(fit.run.path / "result.json", {**content, "checkpoint": where})


def offer_logs(session: FitSession, fit: Fit) -> None:
    """Tell the launcher of each node if all nodes share the user's checkpoint directory, to send logs through it. A collective."""
    channel = link()
    is_users_own = fit.store.directory != fit.run.checkpoints
    if channel is None or session.setup.plan.num_nodes == 1 or not is_users_own or not fit.store.is_shared():
        return
    if session.context.local_rank == 0:
        channel.send({"kind": "shares", "directory": str(fit.store.directory.absolute())})


def lines_to_resume(session: FitSession, fit: Fit) -> list[str]:
    """Return the lines that say how to resume after a signal. Return none if our launcher shows them."""
    if not was_interrupted(fit.state) or link() is not None or session.checkpoint is None:
        return []
    if session.setup.handover is not None:  # `distributed train` under a foreign launcher
        return [resume_lines(f"the same command with --run-dir {shlex.quote(str(fit.run.path))} --resume")]
    return [resume_lines(resume_setting(session.checkpoint))]


def write_report(fit: Fit, context: WorkerContext, on_event: OnEvent) -> None:
    """Write the report of the run. Called on all ranks; the main process writes.

    If our launcher started the run, the launcher writes the report later, because it knows how the run ended. A logger that
    uploads files needs a report before that. Without our launcher, the main process also updates the copy of the run directory
    in object storage, if there is one.
    """
    is_sent = any(isinstance(callback, Tracker) for callback in fit.callbacks)
    if context.is_main_process and (is_sent or link() is None):
        write_reports_at_end(fit.run, lambda text: on_event({"kind": "notice", "text": text}))
    if context.is_main_process and link() is None and (problem := push_at_end(fit.run.path)):
        on_event({"kind": "warning", "text": problem})
