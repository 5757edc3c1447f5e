"""The trial protocol on a network that delays, repeats, drops and reorders messages, checked after each step.

The method is Jepsen's, but in one process and one thread, so that a failing history can be repeated and shortened.
Several runs of trainings call the functions of the service over each kind of database: they ask, report, send
heartbeats, end, fall silent, and are resumed from checkpoints while they still run; the server's clock jumps. Any
message may arrive again at any time. `tests/support/trial_model.py` computes the expected outcome, and
`tests/support/protocol_machine.py` checks the invariants.

Add each failing history that hypothesis prints to `KNOWN`, so that every later run repeats it.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from bso_server.core.access import UNRESTRICTED, Caller
from bso_server.core.model import TrialRecord
from bso_server.service.commands import Commands
from bso_server.service.reports import Outcome, ReportBatch
from bso_server.storage.database import open_sqlite_file
from bso_server.storage.rows import StoredEpoch
from bso_server.storage.sqlite import SyncStore
from bso_server.storage.transaction import Transaction
from tests.support.databases import DATABASES, empty_database
from tests.support.properties import THOROUGH
from tests.support.protocol_machine import IN_VAIN, IS_LOST, Histories
from tests.support.service import BlockingStore
from tests.support.trial_model import RUNNING
from zeus_plugins.protocol import TrialDispatch, TrialEnd

MEMORY = Path("/dev/shm")  # noqa: S108 - a private folder is created there


@pytest.fixture(scope="module", params=DATABASES)
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """One database of each kind for all histories, in turn; a SQLite file is in memory, where a commit is quick."""
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        empty_database(request.param, Path(folder)) as url,
    ):
        file = open_sqlite_file(url, busy_timeout_s=1.0)
        Histories.store = BlockingStore(url) if file is None else SyncStore(file, threading.RLock())
        yield request.param
        Histories.store.close()


def play(machine: type[Histories], histories: int, phases: Sequence[Phase] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=30,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.hypothesis
def test_random_histories_keep_the_promises_of_the_server(database: str) -> None:
    histories = 400 if settings().max_examples >= THOROUGH else 40
    # On a database server, each statement is a round trip.
    play(Histories, histories if database == "sqlite" else histories // 40)


def two_runs(state: Histories) -> None:
    """A run believed dead is alive and sends everything."""
    state.begin()
    state.train()
    state.pass_time(seconds=4000.0)
    state.expire()
    state.resume(epochs_lost=1)
    state.train(pick=1)
    state.train(metric=0.95, time_s=2000.0)
    assert state.rows[1].state is RUNNING
    assert state.runs[0].has_ended
    assert not state.runs[1].has_ended


def a_take_over_that_arrives_late(state: Histories) -> None:
    """Two runs resume; then the first take-over arrives again."""
    state.begin()
    state.resume()
    state.resume()
    for pick in range(len(state.network)):
        state.arrive_again(pick=pick)
    assert state.rows[1].lease_epoch == 3


def a_take_over_without_an_answer(state: Histories) -> None:
    """A run resumes without the server, trains, and takes the trial over with its first result."""
    state.begin()
    state.resume(fate=IN_VAIN)
    state.train(pick=1, fate=IS_LOST)
    state.deliver_what_waits()
    assert (state.rows[1].lease_epoch, state.rows[1].report_count) == (3, 1)


KNOWN = [two_runs, a_take_over_that_arrives_late, a_take_over_without_an_answer]


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("history", KNOWN)
def test_known_history_keeps_the_promises_of_the_server(history: Callable[[Histories], None]) -> None:
    state = Histories()
    history(state)
    state.teardown()


# --- Servers with a defect --------------------------------------------------------------------------------------------


class EndsForTheDead(Commands):
    """Let any run end the trial."""

    def end_trial(self, transaction: Transaction, end: TrialEnd, caller: Caller = UNRESTRICTED) -> None:
        super().end_trial(transaction, end.model_copy(update={"lease_epoch": None}), caller)


class ForgetsArms(Commands):
    """Store only the trial of a dispatch."""

    def begin_trial(self, transaction: Transaction, job_id: str, *rest: Any, **named: Any) -> TrialDispatch:
        arms = transaction.arms(job_id)
        dispatch = super().begin_trial(transaction, job_id, *rest, **named)
        transaction.update_arms(job_id, arms.values())
        return dispatch


class LosesReports(ReportBatch):
    """Store only the last report of each trial."""

    def _save(self) -> None:
        self._epochs: list[StoredEpoch] = []
        super()._save()


class SavesTwice(ReportBatch):
    """Count a repeated report."""

    def take(self) -> list[Outcome]:
        self._trials_before = {key: _with_another(trial) for key, trial in self._trials_before.items()}
        self._trials = dict(self._trials_before)
        return super().take()


def _with_another(trial: TrialRecord) -> TrialRecord:
    return replace(trial, report_count=trial.report_count + 1) if trial.report_count > 1 else trial


@pytest.mark.slow
@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("broken", [EndsForTheDead, ForgetsArms, LosesReports, SavesTwice])
def test_random_histories_find_each_defective_server(broken: type[Commands] | type[ReportBatch]) -> None:
    class Broken(Histories):
        commands_of = broken if issubclass(broken, Commands) else Commands
        batch_of = broken if issubclass(broken, ReportBatch) else ReportBatch

    with pytest.raises(AssertionError):
        play(Broken, 400, [Phase.generate])
