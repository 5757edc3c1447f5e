"""Real trainings at the server's size: accumulation, reports and values read from the training."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.frameworks import FrameworkBench, Training
from tests.support.job_bench import EPOCH_OF_24, EPOCH_OF_48, NEVER, NEXT_SIZE, SERVERS_SIZE
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import TrialState


def test_size_too_large_for_device_is_accumulated(bench: FrameworkBench) -> None:
    callback = bench.callback(max_per_device_batch_size=20)
    training = bench.training(callback)
    training.train()
    assert training.sizes == [16] * 10 + [8]
    assert training.accumulation == {3}
    assert training.steps == (4, 4)
    assert training.script == (16, 1)
    assert training.left_behind(callback) == []


def test_accumulation_of_user_divides_size(bench: FrameworkBench) -> None:
    training = bench.training(bench.callback(), accumulation=4)
    training.train()
    assert training.sizes == [SERVERS_SIZE // 4] * 14
    assert training.accumulation == {4}
    assert training.steps == (4, 4)


def test_validation_within_epoch_is_reported_with_share_of_epoch(bench: FrameworkBench) -> None:
    callback = bench.callback(bench.job(NEVER, max_epochs=2), on_failure="stop")
    watch = bench.Watch(callback)
    bench.training(callback, watch, epochs=2, validate_every=6).train()
    assert watch.epochs == [0.5, 1.0, 1.5, 2.0]
    assert bench.only_trial().epochs == 2


def test_trainer_with_fewer_epochs_than_job_is_refused(bench: FrameworkBench) -> None:
    training = bench.training(bench.callback(bench.job(max_epochs=30)), epochs=20)
    problem = rf"{bench.EPOCHS_OPTION}=20\) ends before the job's max_epochs \(30\)"
    with pytest.raises(ZeusBSOConfigError, match=problem):
        training.train()
    assert not bench.is_registered()


def test_second_training_is_second_trial(bench: FrameworkBench) -> None:
    callback = bench.callback()
    first, second = bench.training(callback), bench.training(callback)
    with pytest.raises(ZeusBSOOperationOrderError, match="there is no trial before"):
        _ = callback.trial
    first.train()
    assert (callback.trial.trial_number, callback.trial.batch_size) == (1, SERVERS_SIZE)
    second.train()
    assert (callback.trial.trial_number, callback.trial.batch_size) == (2, NEXT_SIZE)
    assert (first.sizes, second.sizes) == (EPOCH_OF_48, EPOCH_OF_24)
    assert [trial.state for trial in bench.view().trials] == [TrialState.COMPLETED] * 2


def give(training: Training, model: Any) -> None:
    """Let the training train this model."""
    training.model = model
    if hasattr(training.trainer, "model_wrapped"):  # Lightning gets the model when the training begins.
        training.trainer.model = training.trainer.model_wrapped = model


def test_training_of_trained_model_has_size_of_user_and_no_trial(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture
) -> None:
    callback = bench.callback()
    first, second = bench.training(callback), bench.training(callback)
    first_weights = copy.deepcopy(first.model.state_dict())
    first.train()
    give(second, first.model)
    first.model.seen_sizes.clear()
    second.train()
    assert set(second.sizes[:-1]) == {16}
    assert "has trained this model, and this one goes on from there: it has its own batch size" in caplog.text
    assert not callback.has_trial
    assert len(bench.view().trials) == 1
    third = bench.training(callback)
    give(third, first.model)
    first.model.load_state_dict(first_weights)
    third.train()
    assert callback.trial.trial_number == 2


# Trainings for which only a target and a metric are stated


def test_job_is_named_after_training(bench: FrameworkBench) -> None:
    zeus = bench.guessing(job_id=None)
    bench.training(zeus).train()
    assert zeus.trial.job_id.endswith("-Classifier-score-0-1xA40")


@pytest.mark.parametrize("level", ["NOTSET", "WARNING"])
def test_begin_and_end_are_printed_once_unless_the_level_is_above_info(
    mortal_bench: FrameworkBench, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], level: str
) -> None:
    bench = mortal_bench  # on the shared server, the job may start warm from the job of another test
    with caplog.at_level(level, logger="zeus_plugins"), caplog.at_level("INFO"):
        bench.training(bench.guessing()).train()
    # Lightning has a logger for its users, the Trainer has none.
    lines = caplog.messages if bench.HAS_LOGGER else capsys.readouterr().err.splitlines()
    said = [line for line in lines if "zeus: " in line]
    if level == "WARNING":
        assert said == []
        return
    assert said[:3] == [
        f"zeus: batch size 16, your own: first run of job {bench.job_id} (trial 1)",
        "zeus: guessed: batch sizes 2, 4, 8, 16, 32, 64, 128; at most 1 epoch (job=JobSpec(…) sets them)",
        f"zeus: results are kept in {bench.server.url}",
    ]
    assert said[3].startswith("zeus: target reached after 1 epoch: score ")
    assert len(said) == 5
