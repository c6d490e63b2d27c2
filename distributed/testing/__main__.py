"""`python -m distributed.testing fsdp:1,2,3 'deepspeed[zero_stage=3]:2'` runs the conformance suite on these backends.

Each argument is NAME, NAME:SIZES or NAME[SETTING=VALUE,...]:SIZES, where SIZES are numbers of processes (default: 2,3,
and 1 for a backend of one process).
With `--checkpoints` it prints the table of checkpoints that each of them writes and each of them reads.
Exits with 1 if a check fails, and with 2 or 3 in the same cases as `train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from distributed.errors import DistributedError
from distributed.runs.temporary import temporary_directory
from distributed.testing.adapter import Adapter
from distributed.testing.conformance import checks_for
from distributed.testing.faults import check_exception, check_kill, check_refusals, check_starts
from distributed.testing.running import AllReferences, Ran, train_cases
from distributed.testing.travel import Trip, table, travel


def main(argv: Sequence[str]) -> int:
    """Run the suite, or make the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m distributed.testing", description=__doc__)
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER", help="NAME:1,2,3 or NAME[SETTING=VALUE]:1,2,3")
    parser.add_argument("--checkpoints", action="store_true", help="the table of travelling checkpoints as Markdown")
    arguments = parser.parse_args(argv)
    try:
        adapters = [_adapter(text) for text in arguments.adapters]
    except DistributedError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    with temporary_directory() as directory:
        try:
            return _run(adapters, directory, only_checkpoints=arguments.checkpoints)
        except AssertionError as error:  # raised by the training that every check needs
            sys.stdout.write(f"FAILED {error}\n")
            return 1


def _adapter(text: str) -> Adapter:
    adapter = Adapter.parse(text)
    adapter.check()
    return adapter


def _run(adapters: Sequence[Adapter], directory: Path, *, only_checkpoints: bool) -> int:
    references = AllReferences(directory)
    ran = [
        train_cases(adapter, size, directory / f"{number}-{size}")
        for number, adapter in enumerate(adapters)
        for size in adapter.world_sizes
    ]
    if only_checkpoints:
        return _checkpoints(ran, references, directory)
    problems = [*_cases(ran, references), *_ends(adapters, directory)]
    sys.stdout.write(f"{len(problems)} problems\n" if problems else "all checks passed\n")
    return 1 if problems else 0


def _checkpoints(ran: Sequence[Ran], references: AllReferences, directory: Path) -> int:
    """Print one table for torch modules, and one for each backend that has a reference of its own."""
    by_reference: dict[int, list[Ran]] = {}
    for one in ran:
        by_reference.setdefault(id(references.of(one.adapter)), []).append(one)
    bad = []
    for number, alike in enumerate(by_reference.values()):
        found, trips = references.of(alike[0].adapter), list[Trip]()
        for index, target in enumerate(alike):
            out = directory / f"to-{number}-{index}"
            trips += travel(found.sources(alike), target.adapter, target.world_size, out, found)
            sys.stderr.write(f"{len(trips)} checkpoints taken up, the last by {target}\n")
        sys.stdout.write(f"{table(trips)}\n\n{len(trips)} checkpoints taken up\n\n")
        bad += [trip for trip in trips if not trip.is_good]
    for trip in bad:
        sys.stdout.write(f"{trip}\n")
    return 1 if bad else 0


def _cases(ran: Sequence[Ran], references: AllReferences) -> Iterator[str]:
    for one in ran:
        found = references.of(one.adapter)
        for name, check in checks_for(one.adapter).items():
            yield from _tried(f"{one}: {name}", lambda: check(one, found))  # noqa: B023 - called at once


def _ends(adapters: Sequence[Adapter], directory: Path) -> Iterator[str]:
    for number, adapter in enumerate(adapters):
        size, out = max(adapter.world_sizes), directory / f"ends-{number}"
        yield from _tried(f"{adapter}: starts in a row", lambda: check_starts(adapter, size, out / "starts", 2))  # noqa: B023
        yield from _tried(f"{adapter}: an exception on one rank", lambda: check_exception(adapter, size, out / "raise"))  # noqa: B023
        yield from _tried(f"{adapter}: a killed rank", lambda: check_kill(adapter, size, out / "kill"))  # noqa: B023
        yield from _tried(f"{adapter}: refusals", lambda: check_refusals(adapter))  # noqa: B023


def _tried(name: str, check: Callable[[], object]) -> Iterator[str]:
    """Run a check and print its result. Yield its name if it failed."""
    try:
        check()
    except AssertionError as error:
        sys.stdout.write(f"FAILED {name}: {error}\n")
        yield name
    else:
        sys.stdout.write(f"ok     {name}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
