"""`distributed why`: say in a few lines why a run failed, hangs or ended, and what was done about it."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from distributed.cli.run_argument import run_path
from distributed.config.addresses import refuse_address
from distributed.errors import shown
from distributed.loggers.wording import duration
from distributed.runs.remote import addresses_of
from distributed.runs.why import STANDING, Problem, Why, read_why

_WIDTH = 80
_NAME = 10  # columns of the names, with the indentation
_MOST_LINES = 10  # of all
# Lines of a fact: an error of this package ends with what to do, and there may be several ranks.
_MOST_LINES_OF = {"cause": 5, "where": 4}
_MOST_OTHER_LINES = 3
# If all facts together have too many lines, these lose lines in this order, down to these numbers.
_FEWEST_LINES_OF = (("output", 1), ("then", 1), ("try", 2), ("saves", 1), ("cause", 3), ("try", 1), ("where", 3))


def why(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", callback=run_path)],
    as_json: Annotated[bool, typer.Option("--json", help="print everything as one JSON object")] = False,
) -> None:
    """Say why a run failed, hangs or ended: what failed first, on which rank, where in the script, and what was done about it.

    The command only reads the run directory. So it works on any machine that sees the directory, even during the run.
    """
    refuse_address(run, "'distributed why'")
    found = read_why(run)
    if as_json:
        print(json.dumps(_as_json(found), indent=1))
        return
    for line in lines_of(found):
        print(line)


def lines_of(found: Why) -> list[str]:
    """Return what `found` says in lines that a terminal of 80 columns shows, apart from paths that are longer."""
    facts = {
        "cause": _cause(found), "where": _where(found.problem), "then": _then(found), "saves": _saves(found), "seen": _seen(found),
        "output": _output(found.problem), "try": found.fix, "continue": _continue(found), "log": _log(found),
    }  # fmt: skip
    whole = f"{found.state.path.absolute()}/"  # a message may name files of the run by their whole paths
    facts = {name: text.replace(whole, f"{found.state.path}/") for name, text in facts.items()}
    lines = {
        name: _wrapped(name, text, _MOST_LINES_OF.get(name, _MOST_OTHER_LINES)) for name, text in facts.items() if text
    }
    for name, least in _FEWEST_LINES_OF:
        beyond = 1 + sum(map(len, lines.values())) - _MOST_LINES
        if beyond > 0 and len(here := lines.get(name, ())) > least:
            lines[name] = _wrapped(name, facts[name], max(least, len(here) - beyond))
    return [shown(_head(found)), *(line for each in lines.values() for line in each)]


def _wrapped(name: str, text: str, most: int) -> list[str]:
    return textwrap.wrap(
        shown(text), _WIDTH, initial_indent=f"  {name}".ljust(_NAME + 2), subsequent_indent=" " * (_NAME + 2),
        break_long_words=False, break_on_hyphens=False, max_lines=most, placeholder=" ...",
    )  # fmt: skip


def _head(found: Why) -> str:
    state = found.state
    where = f" on {state.host}" if state.host and not state.is_over else ""
    at = f" at step {state.step}" if state.step or found.verdict == "finished" else " before its first step"
    if found.verdict == "failed" and found.problem is not None and found.problem.step:
        at = f" in step {found.problem.step}"
    epoch = f", epoch {state.epoch}" if state.epoch else ""
    more = f" ({found.stop_reason})" if found.stop_reason and found.verdict == "finished" else ""
    part = f", according to {state.part_of}" if state.part_of else ""
    return f"{state.path}: {found.verdict}{where}{at}{epoch}{more}{part}"


def _cause(found: Why) -> str:
    problem = found.problem
    if found.verdict == "killed":
        return _killed(found)
    if found.verdict == "interrupted":
        # A part is only interrupted if the workers of all nodes have saved.
        has_saved = found.stopped_by or found.state.part_of
        return f"stopped by {found.stopped_by or 'a signal'}, {'after a checkpoint' if has_saved else 'without a checkpoint at the end'}"
    if found.verdict == STANDING:
        usual = f"; its log lines usually come every {duration(found.usual_s)}" if found.usual_s else ""
        return f"no sign of progress for {duration(found.silent_s)}{usual}"
    if problem is None:
        return "" if found.verdict in ("finished", "running", "starting") else "no cause was recorded"
    if found.verdict == "failed":
        return problem.cause
    return f"{_times(found.num_failures)} before, last: {problem.cause}"


def _killed(found: Why) -> str:
    who = "rank 0" if found.is_rank_0 else "the launcher"
    which = f" ({found.launcher})" if found.launcher else ""
    others = "" if found.is_rank_0 else ", and its workers ended with it"
    return f"{who}{which} ended without recording a cause{others}: it was killed (SIGKILL), or the machine went down"


def _times(count: int) -> str:
    return f"failed {count} times" if count > 1 else "failed once"


def _where(problem: Problem | None) -> str:
    if problem is None:
        return ""
    rank = "" if problem.rank is None else f"rank {problem.rank}"
    node = f"node {problem.node}" if problem.node else ""
    step = "" if problem.step is None else f"step {problem.step}" if problem.step else "before step 1"
    step = f"{step} ({problem.phase})" if step and problem.phase else step or problem.phase
    if not step and problem.kind in ("exception", "exit") and rank:
        step = "outside of a fit"
    return ", ".join(each for each in (rank, node, step, _at(problem.location)) if each)


def _at(location: str) -> str:
    return location if not location or location.startswith("rank ") else f"at {location}"


def _then(found: Why) -> str:
    """Return what was done about the failures."""
    steps = [f"step {step}" if step else "the start" for step in found.resumed_at]
    last = found.problem.then if found.problem is not None else ""
    done = []
    if found.num_restarts:
        done.append(f"restarted {'once' if found.num_restarts == 1 else f'{found.num_restarts} times'}")
    if found.problem is not None and found.problem.has_gone_on:  # what was to be done next has been done
        if last.startswith("going on"):
            done.append(f"went on{last.removeprefix('going on')}")
        last = ""
    if steps:
        done = [*(done or ["went on"]), f"from {steps[-1] if len(steps) > 3 else ', '.join(steps)}"]
    return "; ".join(each for each in (*found.nodes, ", ".join(done), last) if each)


def _saves(found: Why) -> str:
    count = len(found.failed_saves)
    failed = f"{count} failed, last {found.failed_saves[-1]}" if count else ""
    later = "later ones succeeded" if count and found.has_saved_since else ""
    damaged = f"set aside: {', '.join(found.damaged[-3:])}" if found.damaged else ""
    deleted = f"deleted during the run: {', '.join(found.deleted[-3:])}" if found.deleted else ""
    return "; ".join(each for each in (failed, later, damaged, deleted) if each)


def _seen(found: Why) -> str:
    """Return the last sign of life of a run that has not ended, or was killed."""
    if found.verdict not in (STANDING, "killed", "running", "starting"):
        return ""
    checkpoint = f", checkpoint {Path(found.state.checkpoint).name}" if found.state.checkpoint else ""
    return f"last sign of progress {duration(found.silent_s)} ago, at step {found.state.step}{checkpoint}"


def _output(problem: Problem | None) -> str:
    if problem is None or problem.last_output in problem.cause:
        return ""
    return f"its last line: {problem.last_output}"


def _continue(found: Why) -> str:
    if found.verdict not in ("failed", "killed", "interrupted") or found.state.part_of:
        return ""
    where = _checkpoint(found)
    return "" if where is None else f"with --run-dir {found.state.path} --resume, from {Path(where).name}"


def _checkpoint(found: Why) -> str | None:
    """Return the newest checkpoint of the run, relative to its directory, or None if there is none any more.

    One outside of the directory, which need not be visible here, or with a copy in object storage is taken as it was recorded.
    """
    recorded = found.state.checkpoint
    if not recorded or recorded.startswith("..") or addresses_of(found.state.path):
        return recorded or None
    path = found.state.path / recorded
    if path.is_dir():
        return recorded
    kept = sorted(path.parent.glob("step-*")) if path.parent.is_dir() else []
    return str(Path(recorded).with_name(kept[-1].name)) if kept else None


def _log(found: Why) -> str:
    problem, path = found.problem, found.state.path
    if problem is None or found.verdict == "finished":
        return ""
    return ", ".join(str(path / each) for each in (problem.log, problem.stacks) if each)


def _as_json(found: Why) -> dict[str, Any]:
    state, problem = found.state, {} if found.problem is None else dataclasses.asdict(found.problem)
    if problem:
        problem["place"] = problem.pop("location")  # its name in events.jsonl
    return {
        "run": str(state.path), "status": state.status, "verdict": found.verdict, "step": state.step, "epoch": state.epoch,
        "problem": problem or None, "num_failures": found.num_failures,
        "num_restarts": found.num_restarts, "resumed_at": list(found.resumed_at), "failed_saves": list(found.failed_saves),
        "nodes": list(found.nodes), "damaged": list(found.damaged), "stopped_by": found.stopped_by, "stop_reason": found.stop_reason,
        "silent_s": found.silent_s,
        "launcher": found.launcher, "checkpoint": _checkpoint(found), "fix": found.fix, "time": time.time(),
    }  # fmt: skip
