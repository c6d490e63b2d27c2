"""Read several files, or parts of files, at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from distributed.config.cores import cores_of_rank

_MAX_THREADS = 4  # more threads gain little, because they share the memory's bandwidth


def run_in_threads(tasks: Sequence[Callable[[], object]], stop: threading.Event | None = None) -> None:
    """Run `tasks` in this thread and a few others, in their order, and wait until all have ended.

    If tasks fail, raise the error of the first of them, and do not begin further ones. If this thread is interrupted, `stop` is set;
    a long task checks it.
    """
    is_over = stop or threading.Event()
    left, lock = iter(enumerate(tasks)), threading.Lock()
    errors: dict[int, Exception] = {}

    def work() -> None:
        while not errors and not is_over.is_set():
            with lock:
                index, task = next(left, (0, None))
            if task is None:
                return
            try:
                task()
            except Exception as error:  # top frame of a thread: the caller raises it
                errors[index] = error

    num_threads = min(_MAX_THREADS, len(tasks), cores_of_rank()) if len(tasks) > 1 else 1
    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads - 1)]
    started = []
    try:
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:  # the system allows no further thread
                break
            started.append(thread)
        work()
    except BaseException:
        is_over.set()
        raise
    finally:
        for thread in started:
            thread.join()
    if errors:
        raise errors[min(errors)]
