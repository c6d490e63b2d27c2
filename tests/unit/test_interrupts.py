"""A Ctrl-C that something swallowed, as imports of C extensions do."""

from __future__ import annotations

import contextlib
import signal

import pytest

from distributed import Trainer
from distributed.runs.processes import interrupts_kept, keep_interrupts, raise_kept


@pytest.fixture(autouse=True)
def pythons_own():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler  # put back


def swallow():
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_it_is_raised_at_the_end():
    reached = []

    @interrupts_kept()
    def work():
        swallow()
        reached.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached


def test_it_is_raised_before_what_takes_long():
    reached = []

    @interrupts_kept()
    def work(is_interrupted):
        if is_interrupted:
            swallow()
        raise_kept()
        reached.append(is_interrupted)

    work(False)
    with pytest.raises(KeyboardInterrupt):
        work(True)
    assert reached == [False]


def test_another_meaning_stays():
    seen = []
    own = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with interrupts_kept():
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, own)
    assert seen == [signal.SIGINT]


def test_a_fit_that_begins_starts_no_workers_then(tmp_path, monkeypatch):
    import torch

    from distributed import Trainer

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.ones(2), 1

        def __getstate__(self):  # on its way to the workers
            swallow()
            return {}

    monkeypatch.chdir(tmp_path)
    trainer = Trainer(torch.nn.Linear(2, 2), nproc_per_node=2, epochs=1, verbose=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Data())
    assert list(tmp_path.rglob("rank-*.log")) == []


def test_a_worker_that_swallowed_it_joins_nobody(monkeypatch):
    joined = []
    monkeypatch.setattr("distributed.backends.single.SingleBackend.setup", lambda self: joined.append(1))
    keep_interrupts()
    swallow()
    trainer = Trainer(lambda: None, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit([1])
    assert not joined
    signal.signal(signal.SIGINT, signal.default_int_handler)
