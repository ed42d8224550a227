"""The worker: order, errors, cancellation, back-pressure, and that nobody is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from edgespec.core.protocols import CheckCancelled
from edgespec.errors import Cancelled
from edgespec.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


def test_events_arrive_in_order_and_all_work_is_on_one_thread(worker: Worker) -> None:
    threads = []

    def work(check: CheckCancelled) -> Iterator[int]:
        for i in range(1000):
            threads.append(threading.get_ident())
            yield i

    jobs = [worker.submit(work) for _ in range(3)]
    assert [list(job) for job in jobs] == [list(range(1000))] * 3
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    assert worker.call(threading.get_ident) == threads[0]


def test_an_error_reaches_the_reader_and_the_worker_goes_on(worker: Worker) -> None:
    def fail(check: CheckCancelled) -> Iterator[int]:
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
    def endless(check: CheckCancelled) -> Iterator[int]:
        while True:
            check()
            yield 0

    job = worker.submit(endless)
    while job._room._value:  # until it has run ahead as far as it may
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

    def work(check: CheckCancelled) -> Iterator[int]:
        nonlocal made
        while made < 20000:
            made += 1
            yield made - 1

    job = iter(worker.submit(work))
    assert [next(job) for _ in range(10)] == list(range(10))
    assert made < 5000
    assert list(job) == list(range(10, 20000))
