"""Trainings within a hyperparameter search or a cross-validation, which a missed target must not end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.frameworks import FrameworkBench, Work
from tests.support.job_bench import NEVER
from zeus_plugins.protocol import GP_VOI, TrialState

optuna = pytest.importorskip("optuna")


def miss(bench: FrameworkBench) -> float:
    """Train a run that misses its target, with the default `on_failure`."""
    bench.training(bench.callback(bench.job(NEVER, policy=GP_VOI))).train()
    return 0.0


@pytest.fixture(name="_quiet", autouse=True)
def silence_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def test_misses_do_not_end_optuna_study(bench: FrameworkBench, caplog: pytest.LogCaptureFixture) -> None:
    study = optuna.create_study()
    study.optimize(lambda _: miss(bench), n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    assert "this training missed its target; optuna continues with its other trainings" in caplog.text
    assert [trial.state for trial in bench.view().trials] == [TrialState.EXHAUSTED] * 2


def test_misses_do_not_end_loop_over_folds(bench: FrameworkBench) -> None:
    from sklearn.model_selection import KFold

    folds = KFold(2)
    for _ in folds.split(np.zeros((4, 1))):
        miss(bench)
    assert [trial.state for trial in bench.view().trials] == [TrialState.EXHAUSTED] * 2


def test_pruned_training_counts_against_no_size(bench: FrameworkBench) -> None:
    def objective(_: Any) -> float:
        bench.training(bench.callback(bench.job(NEVER)), work=Work({2: optuna.TrialPruned("worse")})).train()
        return 0.0

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    assert study.trials[0].state.name == "PRUNED"
    trial = bench.only_trial()
    assert (trial.state, "TrialPruned: worse" in (trial.message or "")) == (TrialState.WITHDRAWN, True)
