"""Signals that interrupt requests to the embedded server."""

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
    """Call `handler` once in the main thread after `after_s`, unless the block ends earlier."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


OFFLINE = OfflineTrial(job_id="digits-1", batch_size=32)

# Requests take between a fraction of a millisecond and several milliseconds.
MOMENTS_S = [0.0001 * n for n in range(1, 51)]


def test_signal_handler_may_send_requests_during_a_request() -> None:
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
        # No request is answered twice or with the answer of another request.
        assert numbers == list(range(2, 52))
        assert set(beats) == {TrialState.RUNNING}
        assert len(beats) > 5
        trials = client.show_job("digits-1").trials
    assert [trial.trial_number for trial in trials] == list(range(1, 52))
    assert {trial.state for trial in trials[1:]} == {TrialState.COMPLETED}


class _BrokenOffError(BaseException):
    """Raised by a signal handler, like SystemExit in our own handlers."""


# Python discards an exception raised in a callback of its garbage collector.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_exception_from_a_signal_handler_during_a_request_leaves_the_next_request_intact() -> None:
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
    # An interrupted and repeated request is one trial.
    assert [trial.trial_number for trial in trials] == list(range(1, 51))
    assert {trial.state for trial in trials} == {TrialState.COMPLETED}
