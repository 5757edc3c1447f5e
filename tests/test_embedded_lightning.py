"""Trainings with Lightning whose server runs in their own process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.support.ddp_training import SCORES
from tests.support.job_bench import NEVER, seconds_and_joules
from tests.support.lightning_bench import QUIET
from tests.support.lightning_models import Classifier, digits, quiet_trainer, val_loader
from tests.support.two_ranks import JOB_ID, run_two_ranks
from zeus_plugins import JobSpec
from zeus_plugins.client.connect import client_from_environment
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.protocol import TrialState

pytestmark = QUIET


@pytest.fixture(autouse=True)
def _no_server_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEUS_SERVER_URL", raising=False)
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")


@pytest.mark.skipif(sys.platform == "win32" or not hasattr(os, "fork"), reason="loads data in forked processes")
@pytest.mark.filterwarnings("ignore:.*This process.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_fit_with_forked_workers_needs_no_server_url() -> None:
    job = JobSpec(
        job_id="digits-1",
        job_id_prefix="digits",
        batch_sizes=(24, 48),
        default_batch_size=48,
        target_metric=NEVER,
        max_epochs=3,
    )
    callback = ZeusBSOCallback(job, "score", energy_monitor=seconds_and_joules(1.0, 10.0), on_failure="stop")
    module = Classifier()
    loader = DataLoader(digits()[0], batch_size=16, num_workers=2, multiprocessing_context="fork")
    quiet_trainer(callback, max_epochs=3).fit(module, loader, val_loader())
    assert module.seen_sizes == [48, 48, 48, 24] * 3
    with client_from_environment() as client:
        (trial,) = client.show_job("digits-1").trials
    assert (trial.state, trial.epochs) == (TrialState.EXHAUSTED, 3)


def test_memory_that_runs_out_on_the_second_rank_reaches_the_file_from_there(tmp_path: Path) -> None:
    url = f"embedded://{tmp_path / 'bso.sqlite3'}"
    went_well, output = run_two_ranks(url, target=max(SCORES), folder=tmp_path, scenario="memory")
    assert not went_well
    with client_from_environment(url) as client:
        (trial,) = client.show_job(JOB_ID).trials
    assert trial.state is TrialState.INFEASIBLE, output
    assert "CUDA out of memory" in (trial.message or "")
