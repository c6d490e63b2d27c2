"""`distributed submit`: hand a run to a scheduler, and follow or stop it there."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed.cli.examples import examples_text
from distributed.cli.help import paragraphs, sections_text
from distributed.cli.scheduler import Scheduler
from distributed.cli.submit_kubernetes import KUBERNETES
from distributed.cli.submit_ray import RAY, RAY_JOBS
from distributed.cli.submit_slurm import SLURM
from distributed.cli.train import make_parser, read_flags, read_overrides, without_flags
from distributed.config.addresses import refuse_address
from distributed.config.merging import MergedConfig, Overrides
from distributed.config.plan import ProcessPlan
from distributed.errors import ConfigError, nearest
from distributed.launcher.start import check_for_elsewhere
from distributed.launcher.submit.job import BatchJob
from distributed.runs.directory import JOB, choose_run_dir

SCHEDULERS = {"slurm": SLURM, "kubernetes": KUBERNETES, RAY_JOBS: RAY}  # by the word after `submit`
_OF_A_NODE = ("node_rank", "master_addr", "master_port")  # settings that the scheduler gives to each node
_VERBS = {
    "status": "show what the scheduler and the run directory say of a run",
    "logs": "print the output of the job",
    "stop": "end the job, and say how to continue the run",
}


def submit(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises DistributedError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if arguments else 2
    verb, *rest = arguments
    if verb in SCHEDULERS:
        return _hand_over(verb, SCHEDULERS[verb], rest)
    if verb not in _VERBS:
        words = (*SCHEDULERS, *_VERBS)
        raise ConfigError(f"submit {verb!r} is unknown{nearest(verb, words)}: choose one of {', '.join(words)}")
    if rest in (["-h"], ["--help"]):
        sys.stdout.write(_usage())
        return 0
    run_dir = _run_dir(rest, verb)
    _follow(verb, _scheduler_of(run_dir), run_dir)
    return 0


def _usage() -> str:
    starts = [
        (f"{verb} --script FILE [flags] [-- ARGUMENTS]", f"hand a run to {each.title}")
        for verb, each in SCHEDULERS.items()
    ]
    sections = sections_text(
        [("Hand over", starts), ("Follow", [(f"{verb} RUN", text) for verb, text in _VERBS.items()])]
    )
    about = (
        "Hand a run to a scheduler, and follow or stop it there. 'distributed submit SCHEDULER --help' shows the flags."
    )
    return "\n".join(
        ["usage: distributed submit COMMAND ...", "", paragraphs(about), "", sections, examples_text("submit")]
    )


def _hand_over(verb: str, scheduler: Scheduler, arguments: Sequence[str]) -> int:
    """Check a run, and submit it or print what would be submitted."""
    parser = make_parser(f"distributed submit {verb}", about=scheduler.about)
    section = parser.add_argument_group(scheduler.title)
    scheduler.add_flags(section)
    _refuse_token_file(verb, scheduler, arguments)
    command, script_args = read_flags(parser, arguments)
    values = {name: command.pop(name) for name in (*_flag_names(section), *scheduler.takes)}
    own = {name: command.pop(name) for name in ("script", "config", "set", "run_dir", "resume", "dry_run")}
    flags = {name: value for name, value in command.items() if value is not None}
    job_name, options = values.pop("job_name"), scheduler.options(values)
    for each in scheduler.settings(options):
        plain = {name: value for name, value in each.items() if "." not in name}
        dotted = [f"{name}={value}" for name, value in each.items() if "." in name]
        overrides = read_overrides(own["config"], flags | plain, [*own["set"], *dotted], own["script"], script_args)
        merged, plan = check_for_elsewhere(overrides, _gpus(overrides))
    _refuse_settings_of_a_node(verb, scheduler, merged)
    if own["resume"] and own["run_dir"] is None:
        raise ConfigError("--resume needs the directory of the run: add --run-dir RUN")
    script = str(overrides.script)
    refuse_address(own["run_dir"] or "", "the --run-dir of 'distributed submit'")
    run_dir = Path(own["run_dir"] or choose_run_dir(script))
    given = ("run_dir", *_flag_names(section), *scheduler.takes)
    words = without_flags(
        arguments[: len(arguments) - len(script_args)],
        [f"--{name.replace('_', '-')}" for name in given],
        ("--resume", "--dry-run", "--"),
    )
    name = job_name or scheduler.name(Path(script), run_dir)
    all_words = words if scheduler.counts_there else [*words, *_processes(merged, plan)]
    job = BatchJob(name, all_words, script_args, run_dir, plan, settings=merged)
    if own["dry_run"]:
        sys.stdout.write(scheduler.text(job, options))
        return 0
    line = scheduler.submit(job, options, own["resume"])
    print(f"{line}\nrun directory: {run_dir}\nto see its state: distributed submit status {shlex.quote(str(run_dir))}")
    return 0


def _refuse_token_file(verb: str, scheduler: Scheduler, arguments: Sequence[str]) -> None:
    for word in itertools.takewhile(lambda word: word != "--", arguments):
        if word.partition("=")[0].replace("_", "-") == "--token-file":
            raise ConfigError(f"--token-file is not a flag of {verb}: {scheduler.secret}: drop it")


def _refuse_settings_of_a_node(verb: str, scheduler: Scheduler, merged: MergedConfig) -> None:
    """Raise ConfigError if a setting was given that differs on each node, or that only the scheduler knows."""
    for name in _OF_A_NODE:
        if merged.is_given(name):
            raise ConfigError(
                f"{name}={getattr(merged.config, name)!r} does not work with 'submit {verb}': {scheduler.title} gives each node its"
                " number and the address of node 0: drop it"
            )


def _gpus(overrides: Overrides) -> int:
    """Return the number of GPUs to assume on each node: those that were given."""
    total = overrides.value("num_gpus") or 0
    given = overrides.value("gpus_per_node") or total // int(overrides.value("num_nodes", 1))
    is_on_gpu = overrides.value("device") == "cuda"
    return int(given or (overrides.value("nproc_per_node") or 1 if is_on_gpu else 0))


def _processes(merged: MergedConfig, plan: ProcessPlan) -> list[str]:
    """Return `--nproc-per-node N`, unless the number of processes was given."""
    is_given = any(merged.is_given(name) for name in ("nproc_per_node", "gpus_per_node", "num_gpus"))
    return [] if is_given else ["--nproc-per-node", str(plan.nproc_per_node)]


def _flag_names(section: argparse._ArgumentGroup) -> list[str]:
    return [action.dest for action in section._group_actions]


def _run_dir(arguments: Sequence[str], verb: str) -> Path:
    """Return the run directory that the arguments name."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError(f"submit {verb} takes one run directory: distributed submit {verb} RUN")
    return Path(arguments[0])


def _scheduler_of(run_dir: Path) -> Scheduler:
    """Return the scheduler that the run was last handed to. Raises ConfigError if the run was not submitted."""
    written = [each for each in SCHEDULERS.values() if (run_dir / JOB / each.file).exists()]
    if not written:
        raise ConfigError(
            f"{str(run_dir)!r} is not a submitted run: name the run directory that 'distributed submit' printed"
        )
    return max(written, key=lambda each: (run_dir / JOB / each.file).stat().st_mtime)


def _follow(verb: str, scheduler: Scheduler, run_dir: Path) -> None:
    """Print what the scheduler says of a run, or its output, or stop it."""
    if verb == "stop":
        print(scheduler.stop(run_dir))
        return
    if verb == "logs":
        for text in scheduler.logs(run_dir):
            sys.stdout.write(text)
        return
    print(scheduler.status(run_dir))
    if not scheduler.shares_run_dir:
        return
    files = scheduler.files(run_dir)
    if not files.is_dir():
        print(f"the files of the run are on the cluster, in {files}")
        return
    from distributed.cli.runs import list_directory

    list_directory(files)
