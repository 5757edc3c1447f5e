from __future__ import annotations

import threading

import pytest

from bso_server.storage.threads import DaemonThreads


def test_threads_give_results_and_errors() -> None:
    threads = DaemonThreads(2, "test")
    assert threads.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result()
    threads.shutdown()


def test_one_thread_works_in_the_order_of_submission_and_to_its_end() -> None:
    threads, gate, done = DaemonThreads(1, "test"), threading.Event(), list[int]()
    threads.submit(gate.wait)
    for number in range(5):
        threads.submit(done.append, number)
    threads.shutdown(wait=False)
    gate.set()
    threads.shutdown()
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="no more work"):
        threads.submit(done.append, 5)


def test_cancelled_work_is_not_done() -> None:
    threads, gate, done = DaemonThreads(1, "test"), threading.Event(), list[int]()
    threads.submit(gate.wait)
    assert threads.submit(done.append, 1).cancel()
    gate.set()
    threads.shutdown()
    assert done == []


def test_nothing_is_left_of_threads_that_never_worked_or_are_done() -> None:
    before = threading.active_count()
    DaemonThreads(2, "idle").shutdown()
    busy = DaemonThreads(2, "busy")
    busy.submit(int).result()
    busy.shutdown()
    assert threading.active_count() == before
