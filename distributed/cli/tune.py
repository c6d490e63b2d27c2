"""`distributed tune`: run a sweep that finds the settings and arguments with which a script does best."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.cli.train import make_parser, read_flags, read_overrides
from distributed.errors import ConfigError
from distributed.tuning.plan import SCHEDULERS
from distributed.tuning.proposals import SEARCH_ALGORITHMS
from distributed.tuning.scripts import ScriptSweep, SweepOptions

_ABOUT = """\
Run a script many times with different values and keep the best.

A value with the name of a setting becomes this setting. Any other value becomes
an argument of the script: --NAME VALUE. The other flags are those of train and
apply to every trial. --set scheduler=NAME sets the learning-rate schedule."""
_OWN = (
    "search_space", "num_samples", "metric", "mode", "scheduler", "scheduler_option", "search", "max_concurrent",
    "max_failures", "cpus_per_trial", "trials_per_gpu",
)  # fmt: skip


def tune(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Arguments after `--` belong to the script. Raises DistributedError."""
    command, script_args = read_flags(_parser(), arguments)
    own = {name: command.pop(name) for name in ("script", "config", "set", "run_dir", "resume", "dry_run", *_OWN)}
    flags = {name: value for name, value in command.items() if value is not None}
    overrides = read_overrides(own["config"], flags, own["set"], own["script"], script_args)
    options: dict[str, Any] = {
        name: own[name] for name in ("search_space", "metric", "mode", "scheduler", "search", "run_dir", "resume")
    }
    sweep = ScriptSweep(
        overrides, SweepOptions(**options | _numbers(own), scheduler_options=_options(own["scheduler_option"]))
    )
    if own["dry_run"]:
        sys.stdout.write("\n".join(sweep.dry_run_lines()) + "\n")
        return 0
    return sweep.run()


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("distributed tune", "--script FILE --search-space FILE", _ABOUT, {"scheduler"})
    section = parser.add_argument_group("Sweep")
    section.add_argument("--search-space", metavar="FILE", help="YAML file with the possible values of each name")
    section.add_argument(
        "--num-samples", metavar="N", help="number of trials (default for --search grid: all combinations)"
    )
    section.add_argument("--metric", metavar="NAME", default="val_loss", help="metric to optimise (default: val_loss)")
    section.add_argument(
        "--mode", metavar="min|max", help="whether the smallest or largest metric is best (default: from its name)"
    )
    section.add_argument("--scheduler", metavar="NAME", help=f"{', '.join(SCHEDULERS)} or none (default: none)")
    section.add_argument(
        "--scheduler-option", metavar="KEY=VALUE", action="append", default=[],
        help="an option of the scheduler, such as grace_period=2; may be repeated",
    )  # fmt: skip
    section.add_argument(
        "--search",
        metavar="NAME",
        default="random",
        help=f"search algorithm: {', '.join(SEARCH_ALGORITHMS)} (default: random)",
    )
    section.add_argument(
        "--max-concurrent", metavar="N", help="trials that run at the same time (default: as many as fit)"
    )
    section.add_argument("--max-failures", metavar="N", help="restarts of a trial that crashed (default: 0)")
    section.add_argument("--cpus-per-trial", metavar="N", help="CPUs per trial (default: one per process)")
    section.add_argument("--trials-per-gpu", metavar="N", help="trials that share one GPU (default: 1)")
    return parser


def _numbers(own: Mapping[str, Any]) -> dict[str, int]:
    """Return the values of the flags that take whole numbers, for the flags that were given. Raises ConfigError for
    other values."""
    found: dict[str, int] = {}
    least = {"num_samples": 1, "max_concurrent": 1, "max_failures": 0, "cpus_per_trial": 1, "trials_per_gpu": 1}
    for name, minimum in least.items():
        text = own[name]
        if text is None:
            continue
        if not text.isdecimal() or int(text) < minimum:
            raise ConfigError(
                f"{name}={text!r} is not a whole number of at least {minimum}: set {name}={minimum} or more"
            )
        found[name] = int(text)
    return found


def _options(assignments: Sequence[str]) -> dict[str, float]:
    options: dict[str, float] = {}
    for text in assignments:
        name, _, value = text.partition("=")
        try:
            options[name] = float(value)
        except ValueError:
            raise ConfigError(f"--scheduler-option {text!r} is not NAME=NUMBER: write grace_period=2") from None
    return options
