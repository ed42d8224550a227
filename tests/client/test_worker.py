"""The worker: order, errors, cancellation, back-pressure, and that nobody is left waiting."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import sleep

import pytest

from edgespec.cancel import check_cancelled
from edgespec.cli.interrupts import interruptible
from edgespec.client.stream import Stream
from edgespec.client.worker import Worker
from edgespec.core.peers import YIELD, Yield
from edgespec.errors import BackendError, Cancelled


@pytest.fixture
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


def test_events_arrive_in_order_and_all_work_is_on_one_thread(worker: Worker) -> None:
    threads = []

    def work() -> Iterator[int]:
        for i in range(1000):
            threads.append(threading.get_ident())
            yield i

    jobs = [worker.submit(work) for _ in range(3)]
    assert [list(job) for job in jobs] == [list(range(1000))] * 3
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    assert worker.call(threading.get_ident) == threads[0]


def test_an_error_reaches_the_reader_and_the_worker_goes_on(worker: Worker) -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    seen = []
    with pytest.raises(KeyError, match="lost"):
        for event in worker.submit(fail):
            seen.append(event)
    assert seen == [1]
    assert worker.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0)


def test_cancel_ends_a_job_that_nobody_reads(worker: Worker) -> None:
    def endless() -> Iterator[int]:
        while True:
            check_cancelled()
            yield 0

    job = worker.submit(endless)
    while not job.is_full:
        pass
    job.cancel()
    assert worker.call(lambda: "next") == "next"
    seen = []
    with pytest.raises(Cancelled):
        for event in job:
            seen.append(event)
    assert len(seen) >= 2048  # nothing that was said is lost


def test_a_slow_reader_holds_the_work_back(worker: Worker) -> None:
    made = 0

    def work() -> Iterator[int]:
        nonlocal made
        while made < 20000:
            made += 1
            yield made - 1

    job = iter(worker.submit(work))
    assert [next(job) for _ in range(10)] == list(range(10))
    assert made < 5000
    assert list(job) == list(range(10, 20000))


def turns(n: int, said: list[str], name: str) -> Callable[[], Iterator[int | Yield]]:
    """Work that pauses after each of `n` events."""

    def work() -> Iterator[int | Yield]:
        for i in range(n):
            check_cancelled()
            said.append(name)
            yield i
            yield YIELD

    return work


def held(worker: Worker) -> threading.Event:
    """Keep the thread busy until the event is set, so that what is submitted meanwhile begins together."""
    go = threading.Event()

    def work() -> Iterator[int]:
        go.wait(10)
        yield 0

    worker.submit(work)
    return go


@pytest.mark.parametrize("max_concurrency", [1, 2, 3])
def test_jobs_that_share_take_turns_and_so_many_at_once(max_concurrency: int, worker: Worker) -> None:
    said: list[str] = []
    worker.max_concurrency = max_concurrency
    go = held(worker)
    jobs = [worker.submit(turns(4, said, name), shares=True) for name in "abc"]
    go.set()
    assert [list(job) for job in jobs] == [[0, 1, 2, 3]] * 3, "pauses are nobody's events"
    assert "".join(said) == {1: "aaaabbbbcccc", 2: "abababab" + "cccc", 3: "abcabcabcabc"}[max_concurrency]


def test_a_job_for_itself_waits_for_those_before_and_is_not_overtaken(worker: Worker) -> None:
    said: list[str] = []
    worker.max_concurrency = 4
    go = held(worker)
    jobs = [worker.submit(turns(3, said, name), shares=name != "S") for name in "abSc"]
    go.set()
    for job in jobs:
        assert list(job) == [0, 1, 2]
    assert "".join(said) == "ababab" + "SSS" + "ccc"


def test_a_job_that_ends_badly_or_is_cancelled_leaves_the_others_alone(worker: Worker) -> None:
    said: list[str] = []
    worker.max_concurrency = 4

    def fail() -> Iterator[int | Yield]:
        yield 1
        yield YIELD
        raise KeyError("lost")

    def endless() -> Iterator[int | Yield]:
        while True:
            check_cancelled()
            yield YIELD

    go = held(worker)
    failing, gone = worker.submit(fail, shares=True), worker.submit(endless, shares=True)
    job = worker.submit(turns(50, said, "a"), shares=True)
    go.set()
    assert list(job) == list(range(50))
    with pytest.raises(KeyError, match="lost"):
        list(failing)
    later = worker.submit(turns(2, said, "b"), shares=True)  # beside the endless one
    assert list(later) == [0, 1]
    gone.cancel()
    with pytest.raises(Cancelled):
        list(gone)
    assert worker.call(lambda: 7) == 7


def test_closing_ends_a_job_whose_reader_has_stopped() -> None:
    worker = Worker()

    def work() -> Iterator[int]:
        while True:
            yield 1

    stream = worker.submit(work)
    while not stream.is_full:
        sleep(0.001)
    closing = threading.Thread(target=worker.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_a_job_that_comes_while_the_worker_closes_or_later_is_refused() -> None:
    worker, is_finishing, go = Worker(), threading.Event(), threading.Event()

    def finish() -> None:
        is_finishing.set()
        go.wait(10)

    closing = threading.Thread(target=worker.close, args=(finish,), daemon=True)
    closing.start()
    is_finishing.wait(10)
    jobs = [worker.submit(turns(1, [], "a"))]
    go.set()
    closing.join(10)
    jobs.append(worker.submit(turns(1, [], "a")))
    for job in jobs:
        with pytest.raises(BackendError, match="the model has been closed"):
            list(job)


@pytest.mark.parametrize("broken", ["after_turn", "set_idle(True)", "set_idle(False)"])
def test_a_callback_that_fails_refuses_who_waits_and_the_thread_goes_on(broken: str) -> None:
    is_idle, is_mended = threading.Event(), False

    def call_back(name: str) -> None:
        if name == "set_idle(True)":
            is_idle.set()
        if name == broken and not is_mended:
            raise OSError("no pipe")

    def endless() -> Iterator[int | Yield]:
        while True:
            check_cancelled()
            yield YIELD

    worker = Worker(lambda: call_back("after_turn"), lambda is_idle: call_back(f"set_idle({is_idle})"))
    assert is_idle.wait(10)
    with pytest.raises(BackendError, match=r"^the engine's thread has failed: no pipe\.$"):
        list(worker.submit(endless))
    is_mended = True
    with suppress(BackendError):  # the thread may have become idle before
        worker.call(lambda: 7)
    assert worker.call(lambda: 7) == 7
    worker.close()


def test_an_interrupt_is_seen_by_a_reader_that_begins_to_wait() -> None:
    """Python handles a signal that comes between its last look and a wait only after the wait."""

    def work(stream: Stream[int]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while stream._notify is None:
            sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        while not stream.is_cancelled:
            sleep(0.001)
        stream.end()

    for _ in range(100):
        stream: Stream[int] = Stream()
        thread = threading.Thread(target=work, args=(stream,))
        thread.start()
        assert list(interruptible(stream)) == []
        thread.join()
