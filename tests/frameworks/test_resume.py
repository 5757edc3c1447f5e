"""Trainings that resume from a checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.frameworks import VALIDATION, FrameworkBench, Training, Work
from tests.support.job_bench import EPOCH_OF_48, NEVER, SERVERS_SIZE
from zeus_plugins.errors import ZeusBSOOperationOrderError
from zeus_plugins.protocol import TrialState

STEPS = len(EPOCH_OF_48)
EPOCH = STEPS + VALIDATION  # Seconds on the clock of a `Work`.
TWO_EPOCHS = 2 * STEPS


def resumable(
    bench: FrameworkBench, work: Work, job: dict[str, Any] | None = None, lr_scaling: str = "none", **options: Any
) -> tuple[Training, Any]:
    """Return a training of a four-epoch job that misses its target, with a checkpoint per epoch, and its callback.

    Args:
        bench: The framework.
        work: The measured work.
        job: Further fields of the job.
        lr_scaling: The argument of the callback.
        options: The options of the training.
    """
    spec = bench.job(**({"target": NEVER, "max_epochs": 4} | (job or {})))
    callback = bench.callback(spec, energy_monitor=work.monitor, lr_scaling=lr_scaling, on_failure="stop")
    return bench.training(callback, work=work, **({"epochs": 4, "save_every": 0} | options)), callback


def interrupt(bench: FrameworkBench, batch: int = TWO_EPOCHS + 2, **options: Any) -> None:
    """Train until this batch, which raises `SystemExit` or the given error."""
    error = options.pop("error", SystemExit(143))
    training, _ = resumable(bench, Work({batch: error}), **options)
    with pytest.raises(type(error)):
        training.train()


def test_checkpoint_holds_trial_in_plain_types(bench: FrameworkBench) -> None:
    interrupt(bench)
    trial = bench.saved_trial(TWO_EPOCHS)
    assert (trial["job_id"], trial["trial_number"], trial["batch_size"]) == (bench.job_id, 1, SERVERS_SIZE)
    assert (trial["epoch"], trial["time_s"], trial["energy_j"]) == (2.0, 2.0 * EPOCH, 20.0 * EPOCH)


def test_checkpoint_within_epoch_counts_unreported_cost(bench: FrameworkBench) -> None:
    training, _ = resumable(bench, Work(), {"max_epochs": 2}, epochs=2, save_every=3)
    training.train()
    trial, time_s = bench.saved_trial(6), EPOCH + 2.0
    assert (trial["epoch"], trial["time_s"], trial["energy_j"]) == (1.0, time_s, 10.0 * time_s)
    assert bench.only_trial().time_s == 2.0 * EPOCH


def test_epochs_after_checkpoint_are_trained_again_and_paid_twice(bench: FrameworkBench) -> None:
    seen: list[tuple[float | None, float | None, float | None]] = []

    def look() -> None:
        trial = bench.only_trial()
        seen.append((trial.epochs, trial.time_s, trial.energy_j))

    first, _ = resumable(bench, Work({3 * STEPS + 1: look, 3 * STEPS + 2: SystemExit(143)}))
    with pytest.raises(SystemExit):
        first.train()
    assert seen.pop() == (3.0, 3.0 * EPOCH, 30.0 * EPOCH)
    assert bench.only_trial().state is TrialState.SUSPENDED
    again, callback = resumable(bench, Work({STEPS + 1: look, 2 * STEPS + 1: look}))
    again.train(bench.checkpoint(STEPS))
    assert again.sizes == EPOCH_OF_48 * 3
    look()
    # Three epochs were reported before, and three are trained now; no value known to the server decreases.
    assert seen == [(epochs, known * EPOCH, 10 * known * EPOCH) for epochs, known in ((3.0, 4), (3.0, 5), (4.0, 6))]
    trial = bench.only_trial()
    assert (trial.state, trial.trial_number) == (TrialState.EXHAUSTED, 1)
    assert callback.trial.time_s == 6 * EPOCH


def test_trial_ended_on_server_trains_on_unreported(bench: FrameworkBench, caplog: pytest.LogCaptureFixture) -> None:
    interrupt(bench, error=ValueError("no such label"))
    again, callback = resumable(bench, Work())
    again.train(bench.checkpoint(TWO_EPOCHS))
    assert again.sizes == EPOCH_OF_48 * 2
    assert again.script == (16, 1)
    assert again.left_behind(callback) == []
    trial = bench.only_trial()
    assert (trial.state, trial.epochs) == (TrialState.FAILED, 2)
    assert "it is failed" in caplog.text
    assert "unmeasured and unreported" in caplog.text
    assert bench.saved_trial(4 * STEPS)["batch_size"] == SERVERS_SIZE


def test_checkpoint_without_trial_keeps_own_size_of_script(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.training(save_every=0, epochs=2).train()
    callback = bench.callback()
    training = bench.training(callback, epochs=2)
    training.train(bench.checkpoint(11))
    assert training.sizes == [16] * 10 + [8]
    (warning,) = [record for record in caplog.records if record.name == "zeus_plugins"]
    assert warning.levelno == logging.WARNING
    assert "the checkpoint holds no trial" in warning.getMessage()
    assert not bench.is_registered()
    with pytest.raises(ZeusBSOOperationOrderError, match="continues from a checkpoint without a trial"):
        _ = callback.trial
