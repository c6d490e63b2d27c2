"""Ranks that act together fail together, in threads of one process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from distributed.checkpoints import turns
from distributed.checkpoints.agreement import Agreement
from distributed.errors import CheckpointError, TrainingError
from tests.unit.test_checkpoint import OneOf, Threads


def on_all(size: int, act: Callable[[int], Any], *, has_store: bool = True) -> tuple[list[BaseException | None], float]:
    """Let every rank run `act` in `Agreement.on_all`. Return the error of each, and the seconds that they took."""
    threads = Threads(size, has_store=has_store)
    began = time.monotonic()
    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(Agreement(OneOf(r, threads), 5).on_all, lambda r=r: act(r)) for r in range(size)]
        return [each.exception() for each in done], time.monotonic() - began


@pytest.mark.parametrize("has_store", [True, False])
@pytest.mark.parametrize(
    ("failing", "expected"), [({1: "disk"}, 1), ({0: "disk", 2: "refused"}, 2), ({1: "refused", 2: "refused"}, 1)]
)
def test_all_ranks_raise_the_first_error_and_a_refusal_before_a_full_disk(
    failing: dict[int, str], expected: int, has_store: bool
) -> None:
    def act(rank: int) -> None:
        if rank in failing:
            raise OSError(28, "full") if failing[rank] == "disk" else CheckpointError(f"not of this run ({rank})")

    errors, _ = on_all(3, act, has_store=has_store)
    kind = OSError if failing[expected] == "disk" else CheckpointError
    assert all(type(error) is kind for error in errors), errors
    own = [rank for rank, said in failing.items() if said == failing[expected]]
    assert all(f"rank {expected}: " in str(errors[rank]) for rank in range(3) if rank not in own)
    assert not any("rank " in str(errors[rank]) for rank in own)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_that_is_not_agreed_on_ends_the_turn_of_the_other_ranks_at_once(failing: int) -> None:
    def act(rank: int) -> None:
        if rank == failing:
            raise ValueError("a bug")

    errors, seconds = on_all(3, act)
    assert isinstance(errors[failing], ValueError) and seconds < 4
    for error in errors[:failing] + errors[failing + 1 :]:
        assert isinstance(error, TrainingError) and error.is_echo
        assert str(error) == f"rank {failing}: ValueError: a bug"


@pytest.mark.parametrize("has_store", [True, False])
def test_what_the_main_process_returns_or_raises_is_known_on_all_ranks(has_store: bool) -> None:
    threads = Threads(3, has_store=has_store)

    def rank_of(rank: int) -> list[Any]:
        agreement, found = Agreement(OneOf(rank, threads), 5), list[Any]()
        for number in range(50):

            def act(number: int = number) -> Any:
                assert rank == 0
                if number % 3 == 1:
                    raise CheckpointError(f"refused {number}")
                return None if number % 3 else {"name": [number, "ü"]}

            try:
                found.append(agreement.on_main(act))
            except CheckpointError as error:
                found.append(str(error).removeprefix("rank 0: "))
        return found

    with ThreadPoolExecutor(3) as pool:
        rows = [each.result(30) for each in [pool.submit(rank_of, rank) for rank in range(3)]]
    values = [({"name": [number, "ü"]}, f"refused {number}", None)[number % 3] for number in range(50)]
    assert rows == [values] * 3


def test_an_agreement_can_be_used_again_after_an_error_that_is_not_agreed_on() -> None:
    threads = Threads(3)

    def rank_of(rank: int) -> list[str]:
        agreement, found = Agreement(OneOf(rank, threads), 5), []
        for number in range(6):

            def act(number: int = number) -> str:
                if number % 2 == 0 and rank == number // 2:
                    raise ValueError(f"bug {number}")
                return f"done {number}"

            try:
                found.append(agreement.on_all(act))
            except (ValueError, TrainingError) as error:
                found.append(str(error).removeprefix(f"rank {number // 2}: ValueError: "))
        return found

    with ThreadPoolExecutor(3) as pool:
        rows = [each.result(30) for each in [pool.submit(rank_of, rank) for rank in range(3)]]
    assert rows == [["bug 0", "done 1", "bug 2", "done 3", "bug 4", "done 5"]] * 3


@pytest.mark.parametrize("interrupted", [0, 1])
def test_if_the_wait_of_a_rank_is_interrupted_the_others_do_not_take_its_work_for_done(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    """A rank that has done its work may leave. The main process cannot know then how the others have ended."""
    threads = Threads(3)

    class Queue(queue.SimpleQueue[Any]):
        def get(self, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == f"rank-{interrupted}":
                raise KeyboardInterrupt
            return super().get(*args, **kwargs)

    monkeypatch.setattr(turns.queue, "SimpleQueue", Queue)
    found: dict[int, Any] = {}
    has_left = threading.Event()  # the interrupted rank

    def work(rank: int) -> str:
        assert rank != 2 or has_left.wait(4)
        return "done"

    def run(rank: int) -> None:
        try:
            found[rank] = Agreement(OneOf(rank, threads), 5).on_all(lambda: work(rank))
        except BaseException as error:
            found[rank] = error
        if rank == interrupted:
            has_left.set()

    ranks = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(3)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(4)
    assert isinstance(found.pop(interrupted), KeyboardInterrupt)
    ends = [str(end) for end in found.values()]
    stopped = [f"rank {interrupted}: KeyboardInterrupt"] * 2
    assert ends == stopped or (interrupted and ends == ["done"] * 2)


@pytest.mark.parametrize("value", ["7", "x y z", "9 0 {"])
def test_another_program_that_writes_to_the_store_is_an_error_at_once(value: str) -> None:
    threads = Threads(2)
    agreement = Agreement(OneOf(0, threads), 5)

    def act() -> None:
        (name,) = {key.partition("/")[0] for key in threads.values} or {agreement._turns._name}
        threads.set(f"{name}/1", value)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(threads.share, 1, None)  # the name of the turns
        began = time.monotonic()
        with pytest.raises((ValueError, IndexError)):
            agreement.on_all(act)
        other.result(5)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("everybody", [True, False])
def test_the_main_process_leaves_a_turn_only_when_the_others_have_read_that_it_is_over(everybody: bool) -> None:
    """Its process may host the store in which they read it, and may end after the turn."""
    threads, may_read = Threads(3), threading.Event()

    class Slow:
        def set(self, key: str, value: str) -> None:
            threads.set(key, value)

        def get(self, key: str) -> bytes:
            return threads.get(key)

        def check(self, keys: list[str]) -> bool:
            assert may_read.wait(20)
            return threads.check(keys)

    def take_turns(rank: int) -> None:
        store = Slow() if rank == 2 else threads
        all_turns = turns.Turns(store, OneOf(rank, threads).context, name="turns", timeout_s=90, describe=str)
        with all_turns.turn(everybody=everybody):
            pass

    with ThreadPoolExecutor(3) as pool:
        main, fast, slow = [pool.submit(take_turns, rank) for rank in range(3)]
        fast.result(20)
        with pytest.raises(TimeoutError):
            main.result(0.3)
        may_read.set()
        slow.result(20)
        main.result(20)


def test_it_is_no_error_if_a_rank_enters_a_turn_of_the_main_process_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next collective notices a rank that hangs, and the launcher names it."""
    monkeypatch.setattr(turns, "_READ_S", 0.2)
    threads = Threads(3)
    late = threading.Event()

    def take_turns(rank: int) -> str:
        all_turns = turns.Turns(threads, OneOf(rank, threads).context, name="turns", timeout_s=20, describe=str)
        with all_turns.turn(everybody=True):
            pass
        assert rank != 2 or late.wait(20)
        with all_turns.turn(everybody=False):
            pass
        return "done"

    with ThreadPoolExecutor(3) as pool:
        main, other, slow = [pool.submit(take_turns, rank) for rank in range(3)]
        assert [main.result(10), other.result(10)] == ["done", "done"]
        late.set()
        assert slow.result(10) == "done"


def test_a_rank_that_is_late_hears_the_error_of_its_own_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process may be some turns ahead of it."""
    monkeypatch.setattr(turns, "_READ_S", 0.05)
    threads, is_ahead = Threads(3), threading.Event()

    def fail(number: int) -> None:
        raise CheckpointError(f"refused {number}")

    def act(rank: int) -> list[str]:
        agreement, found = Agreement(OneOf(rank, threads), 20), []
        agreement.on_all(lambda: None)
        if rank == 2:
            assert is_ahead.wait(20)
        for number in range(5):
            try:
                agreement.on_main(lambda number=number: fail(number))
            except CheckpointError as error:
                found.append(str(error).removeprefix("rank 0: "))
        is_ahead.set()
        return found

    with ThreadPoolExecutor(3) as pool:
        results = [each.result(20) for each in [pool.submit(act, rank) for rank in range(3)]]
    assert results == [[f"refused {number}" for number in range(5)]] * 3


def test_the_main_process_waits_for_a_late_rank_after_it_has_left_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_READ_S", 0.05)
    threads, may_enter = Threads(2), threading.Event()

    def act(rank: int) -> int:
        agreement = Agreement(OneOf(rank, threads), 20)
        agreement.on_all(lambda: None)
        assert rank == 0 or may_enter.wait(20)
        return agreement.on_main(lambda: 3)

    with ThreadPoolExecutor(2) as pool:
        main, late = [pool.submit(act, rank) for rank in range(2)]
        with pytest.raises(TimeoutError):
            main.result(0.5)
        may_enter.set()
        assert [main.result(20), late.result(20)] == [3, 3]


def test_a_rank_that_sends_heartbeats_may_work_for_twice_the_timeout_if_the_store_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The main process works for eight heartbeats, of which four are sent within the timeout."""
    threads, look, keep = Threads(2), Threads.check, Threads.set
    beats, enough = list[str](), threading.Event()

    def look_slowly(self: Threads, keys: list[str]) -> bool:
        threading.Event().wait(0.05)  # the answer of the store takes this long
        return look(self, keys)

    def count(self: Threads, key: str, value: str) -> None:
        keep(self, key, value)
        if key.endswith("/0"):
            beats.append(value)
            if len(beats) == 8:
                enough.set()

    monkeypatch.setattr(Threads, "check", look_slowly)
    monkeypatch.setattr(Threads, "set", count)

    def act(rank: int) -> str:
        assert rank != 0 or enough.wait(20)
        return "done"

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(Agreement(OneOf(rank, threads), 2).on_all, lambda rank=rank: act(rank)) for rank in (0, 1)]
        assert [each.result(30) for each in done] == ["done", "done"]


def test_an_error_of_the_main_process_that_is_not_agreed_on_ends_its_turn_on_all_ranks_at_once() -> None:
    def act() -> None:
        raise ValueError("a bug")

    threads, began = Threads(3), time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(Agreement(OneOf(rank, threads), 5).on_main, act) for rank in range(3)]
        errors = [each.exception() for each in done]
    assert time.monotonic() - began < 4 and isinstance(errors[0], ValueError)
    assert [str(error) for error in errors[1:]] == ["rank 0: ValueError: a bug"] * 2
    assert all(isinstance(error, TrainingError) and error.is_echo for error in errors[1:])


def test_a_rank_that_leaves_a_turn_has_said_that_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may end at once after that."""
    threads, may_say = Threads(2), threading.Event()
    keep = Threads.set

    def set_late(self: Threads, key: str, value: str) -> None:
        assert not key.endswith("/read") or may_say.wait(20)
        keep(self, key, value)

    monkeypatch.setattr(Threads, "set", set_late)

    def take_turns(rank: int) -> None:
        all_turns = turns.Turns(threads, OneOf(rank, threads).context, name="turns", timeout_s=90, describe=str)
        with all_turns.turn(everybody=True):
            pass

    with ThreadPoolExecutor(2) as pool:
        main, other = [pool.submit(take_turns, rank) for rank in range(2)]
        with pytest.raises(TimeoutError):
            other.result(0.3)
        may_say.set()
        other.result(20)
        main.result(20)


def test_hundreds_of_turns_in_a_row_mix_up_no_answers() -> None:
    """Ranks enter and leave at different times; in some turns, one of them fails."""
    threads = Threads(3)

    def rank_of(rank: int) -> list[Any]:
        agreement, found = Agreement(OneOf(rank, threads), 5), []
        for number in range(300):
            time.sleep(0.001 * ((number * 7 + rank * 5) % 3))
            fails = number % 5 == 0 and rank == number % 3

            def act(fails: bool = fails, number: int = number) -> int:
                if fails:
                    raise CheckpointError(f"turn {number}")
                return number

            try:
                found.append(agreement.on_all(act) if number % 4 else agreement.on_main(lambda number=number: number))
            except CheckpointError as error:
                found.append(str(error).removeprefix(f"rank {number % 3}: "))
        return found

    with ThreadPoolExecutor(3) as pool:
        rows = [each.result(60) for each in [pool.submit(rank_of, rank) for rank in range(3)]]
    expected = [f"turn {number}" if number % 5 == 0 and number % 4 else number for number in range(300)]
    assert rows == [expected] * 3


def entered(size: int, is_first: Callable[[int], bool], block: Callable[[int], None]) -> list[BaseException | None]:
    """Let every rank enter `Agreement.first` with `block`. Return the error of each."""
    threads = Threads(size)

    def enter(rank: int) -> None:
        with Agreement(OneOf(rank, threads), 5).first(is_first(rank), "the download"):
            block(rank)

    with ThreadPoolExecutor(size) as pool:
        return [each.exception() for each in [pool.submit(enter, rank) for rank in range(size)]]


@pytest.mark.parametrize("num_first", [1, 2])
def test_the_others_enter_the_block_when_the_first_have_left_it(num_first):
    begun, left = [], []

    def block(rank):
        begun.append((rank, len(left)))
        left.append(rank)

    assert entered(4, lambda rank: rank < num_first, block) == [None] * 4
    assert sorted(rank for rank, _ in begun) == [0, 1, 2, 3]
    assert all(num_left >= num_first for rank, num_left in begun if rank >= num_first)


@pytest.mark.parametrize("failing", [0, 1])
def test_if_the_block_fails_on_a_first_rank_the_others_raise_and_do_not_enter_it(failing):
    begun = []

    def block(rank):
        begun.append(rank)
        if rank == failing:
            raise ValueError("no network")

    errors = entered(3, lambda rank: rank < 2, block)

    assert sorted(begun) == [0, 1]
    assert isinstance(errors[failing], ValueError)
    for error in errors[:failing] + errors[failing + 1 :]:
        assert isinstance(error, TrainingError) and error.is_echo
        assert str(error) == f"rank {failing}: the download failed with ValueError: no network"
