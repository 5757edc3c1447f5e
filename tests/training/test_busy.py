"""A training on a busy machine: its reports, and its lines for the user."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest

from tests.support.contract_double import KEEP_TRAINING, ContractDouble
from tests.support.sessions import running_session, through_a_checkpoint
from zeus_plugins.energy import Measurement, processes
from zeus_plugins.training.trial import TrialInfo

TRIAL = TrialInfo(job_id="job-1", batch_size=64, trial_number=1)
REMARK = "on a busy machine: it waited 40% of its time for a core"
REMEDY = "; set OMP_NUM_THREADS=1 or torch.set_num_threads(1), or run it at another hour"


def test_share_of_waiting_is_reported_and_survives_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(step=2.0)  # two more seconds at each reading
    monkeypatch.setattr(processes, "waits_s", lambda: {1: next(seconds), 2: 1.0})
    server = ContractDouble(KEEP_TRAINING)
    session = running_session(server, (8.0, 10.0), (8.0, 10.0), (8.0, 10.0))
    session.report_evaluation(0.5)
    assert server.sent("POST", "/report")[0]["waited_share"] == 0.25
    assert TrialInfo.restored(through_a_checkpoint(session.state_dict())).waited_s == 4.0


@pytest.mark.parametrize(("waited_s", "remark"), [(None, None), (0.0, None), (1.9, None), (4.0, REMARK)])
def test_long_waiting_for_a_core_causes_a_remark(waited_s: float | None, remark: str | None) -> None:
    trial = TRIAL.plus(Measurement(10.0, 50.0, "rapl"), waited_s).model_copy(update={"trial_number": 2})
    assert trial.busy_remark == remark


@pytest.mark.parametrize(("threads", "number", "remark"), [(2, 1, REMARK + REMEDY), (1, 1, REMARK), (2, 2, REMARK)])
def test_remedy_is_said_once_per_job_if_torch_uses_several_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int, number: int, remark: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: threads))
    trial = TRIAL.plus(Measurement(10.0, 50.0, "rapl"), 4.0).model_copy(update={"trial_number": number})
    assert trial.busy_remark == remark


def test_waiting_longer_than_the_time_counts_as_the_whole_time() -> None:
    assert TRIAL.plus(Measurement(1.0, 1.0, "rapl"), 3.0).waited_share == 1.0
    assert TRIAL.waited_share is None


@pytest.mark.parametrize(
    ("source", "spent"),
    [
        ("rapl", "10 s and 50 J (rapl)"),
        ("estimate: 65 W stated × CPU time / 4 cores", "10 s and 50 J (estimate: 65 W stated × CPU time / 4 cores)"),
        ("estimate: 5 W stated", "10 s (energy: estimate: 5 W stated × time)"),
    ],
)
def test_energy_estimated_from_time_is_stated_once(source: str, spent: str) -> None:
    assert TRIAL.plus(Measurement(10.0, 50.0, source)).spent == spent
