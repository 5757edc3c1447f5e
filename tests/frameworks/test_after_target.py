"""Trainings that continue after their target (``after_target="continue"``)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.frameworks import VALIDATION, FrameworkBench, Training, Work
from tests.support.job_bench import EPOCH_OF_48, NEVER
from zeus_plugins.errors import ZeusBSOTrainFailError
from zeus_plugins.protocol import TrialState

STEPS = len(EPOCH_OF_48)
UNTIL_TARGET = 2 * (STEPS + VALIDATION)  # Seconds on the clock of a `Work`.


def beyond(bench: FrameworkBench, work: Work, **options: Any) -> tuple[Training, Any]:
    """Return a training of four epochs with a checkpoint after each; the second epoch reaches the target."""
    callback = bench.callback(
        bench.job(0.9, max_epochs=4), energy_monitor=work.monitor, after_target="continue", **options
    )
    return bench.training(callback, work=work, epochs=4, scores=(0.1, 0.9), save_every=0), callback


def windows_open_in_epoch(number: int, work: Work, found: list[list[str]]) -> dict[int, Any]:
    return {(number - 1) * STEPS + 2: lambda: found.append(work.monitor.open_windows)}


def test_training_continues_and_costs_same_as_at_target(
    bench: FrameworkBench, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found: list[list[str]] = []
    work = Work()
    work._events = windows_open_in_epoch(2, work, found) | windows_open_in_epoch(4, work, found)
    training, callback = beyond(bench, work)
    with caplog.at_level("INFO"):
        training.train()
    assert (training.epochs, training.sizes) == (4, EPOCH_OF_48 * 4)
    assert found == [["zeus_bso_trial"], []]  # Nothing more is measured after the target.
    assert (callback.trial.verdict.converged, callback.trial.energy_j) == (True, 10.0 * UNTIL_TARGET)
    trial = bench.only_trial()
    assert (trial.state, trial.epochs, trial.energy_j) == (TrialState.COMPLETED, 2, 10.0 * UNTIL_TARGET)
    shown = capsys.readouterr()
    said = caplog.text + shown.out + shown.err
    assert "zeus: the training continued to its own end, which is not counted" in said


def test_training_without_success_still_stops(bench: FrameworkBench) -> None:
    callback = bench.callback(bench.job(NEVER, max_epochs=2), after_target="continue")
    training = bench.training(callback, epochs=4, scores=(0.1,))
    with pytest.raises(ZeusBSOTrainFailError):
        training.train()
    assert training.epochs == 2


@pytest.mark.parametrize("epoch", [1, 3], ids=["before the target", "after it"])
def test_completed_trial_trains_on_from_checkpoint(bench: FrameworkBench, epoch: int) -> None:
    first, _ = beyond(bench, Work({3 * STEPS + 2: SystemExit(143)}))
    with pytest.raises(SystemExit):
        first.train()
    completed = bench.only_trial()
    assert completed.state is TrialState.COMPLETED
    again, _ = beyond(bench, Work())
    again.train(bench.checkpoint(epoch * STEPS))
    assert again.sizes == EPOCH_OF_48 * (4 - epoch)
    assert bench.only_trial() == completed
