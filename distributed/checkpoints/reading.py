"""Read several files, or parts of files, at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

_MAX_THREADS = 4  # more threads gain little, because they share the memory's bandwidth


def run_in_threads(tasks: Sequence[Callable[[], object]]) -> None:
    """Run `tasks` in a few threads, and wait until all have ended.

    If tasks fail, raise the error of the first of them. Tasks that have not begun then are not run.
    """
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, len(tasks))
    if num_threads < 2:
        for task in tasks:
            task()
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
