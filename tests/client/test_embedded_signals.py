"""Signals that break in upon requests to the server in the training's own process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.embedded import GPUS, JOB, final_report
from zeus_plugins.client import client_from_environment
from zeus_plugins.protocol import JobSpecFromClient, OfflineTrial, TrialState

pytestmark = pytest.mark.usefixtures("file")


@contextmanager
def alarm(handler: Callable[[], object], after_s: float) -> Iterator[None]:
    """Have `handler` called once in the main thread, wherever that is by then, unless it is through before."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


OFFLINE = OfflineTrial(job_id="digits-1", batch_size=32)

# Requests take a fraction of a millisecond to some milliseconds.
MOMENTS_S = [0.00005 * n for n in range(1, 101)]


def test_a_signals_handler_may_ask_while_the_thread_that_it_broke_in_upon_asks() -> None:
    with client_from_environment() as client:
        client.register(JobSpecFromClient.of(JOB, GPUS))
        kept = client.request_trial("digits-1")
        beats: list[TrialState] = []
        numbers = []
        for moment_s in MOMENTS_S:
            with alarm(lambda: beats.append(client.heartbeat(kept).state), moment_s):
                trial = client.request_trial("digits-1")
                assert client.send_report(final_report(trial)).converged
            numbers.append(trial.trial_number)
        # None is answered twice, or by another's answer.
        assert numbers == list(range(2, 102))
        assert set(beats) == {TrialState.RUNNING}
        assert len(beats) > 5
        trials = client.show_job("digits-1").trials
    assert [trial.trial_number for trial in trials] == list(range(1, 102))
    assert {trial.state for trial in trials[1:]} == {TrialState.COMPLETED}


class _BrokenOffError(BaseException):
    """Raised by a signal's handler, as SystemExit is by ours."""


# Python gives no one an exception that is raised in a callback of its garbage collector.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_of_a_signals_handler_anywhere_in_a_request_leaves_the_next_one_whole() -> None:
    def break_off() -> None:
        raise _BrokenOffError

    broken_off = 0
    with client_from_environment() as client:
        client.register(JobSpecFromClient.of(JOB, GPUS))
        for n, moment_s in enumerate(MOMENTS_S):
            try:
                with alarm(break_off, moment_s):
                    trial = client.record_offline(OFFLINE, f"key-{n}")
                    client.send_report(final_report(trial))
            except _BrokenOffError:
                broken_off += 1
            trial = client.record_offline(OFFLINE, f"key-{n}")
            assert client.send_report(final_report(trial)).converged
        trials = client.show_job("digits-1").trials
    assert broken_off > 5
    # However often a request was broken off, it is one trial.
    assert [trial.trial_number for trial in trials] == list(range(1, 101))
    assert {trial.state for trial in trials} == {TrialState.COMPLETED}
