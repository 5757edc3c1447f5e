"""How real trainings end their trials: by the server's verdict, too early, or after an error."""

from __future__ import annotations

import pytest
import torch

from tests.support.frameworks import FrameworkBench, Work
from tests.support.job_bench import EPOCH_OF_48, NEVER, SERVERS_SIZE
from zeus_plugins.errors import ZeusBSOTrainFailError
from zeus_plugins.protocol import TrialState

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


# Verdicts


def test_reaching_target_ends_training(bench: FrameworkBench) -> None:
    callback = bench.callback(bench.job(0.9, max_epochs=4))
    training = bench.training(callback, epochs=4, scores=(0.1, 0.9))
    training.train()
    trial = callback.trial
    assert training.epochs == 2
    assert (trial.batch_size, trial.trial_number, trial.job_id) == (SERVERS_SIZE, 1, bench.job_id)
    assert trial.verdict.converged
    assert (trial.time_s, trial.energy_j, trial.energy_source) == (2.0, 20.0, "replayed")
    on_server = bench.only_trial()
    # The score equals the target: single precision must not put it below.
    assert (on_server.state, on_server.epochs, on_server.metric) == (TrialState.COMPLETED, 2, 0.9)
    assert (on_server.time_s, on_server.energy_j, on_server.energy_source) == (2.0, 20.0, "replayed")


def test_failed_trial_raises_after_last_saving(bench: FrameworkBench) -> None:
    training = bench.training(bench.callback(bench.job(NEVER)), save_every=0)
    with pytest.raises(ZeusBSOTrainFailError, match=r"all that max_epochs allows: score .*; launch the training again"):
        training.train()
    assert bench.checkpoint(len(EPOCH_OF_48)).exists()
    assert bench.only_trial().state is TrialState.EXHAUSTED


def test_estimate_is_named_on_machine_without_counter(bench: FrameworkBench) -> None:
    callback = bench.BatchSize(bench.job(higher_is_better_metric=True), "score", server_url=bench.server.url)
    bench.training(callback).train()
    assert callback.trial.time_s > 0
    assert callback.trial.energy_j > 0
    assert callback.trial.energy_source.startswith("estimate: ")
    assert bench.only_trial().energy_source == callback.trial.energy_source


# Errors


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RuntimeError("the user's own"), TrialState.FAILED),
        (OUT_OF_MEMORY, TrialState.INFEASIBLE),
        (SystemExit(143), TrialState.SUSPENDED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_error_of_user_is_raised_and_ends_trial(bench: FrameworkBench, error: BaseException, state: TrialState) -> None:
    callback = bench.callback()
    with pytest.raises(type(error)) as raised:
        bench.training(callback, work=Work({2: error})).train()
    assert raised.value is error
    trial = bench.only_trial()
    assert trial.state is state
    assert str(error) in (trial.message or "")
    assert type(error).__name__ in (trial.message or "")
    # A checkpoint written by a later callback knows the cost until then.
    assert (callback.trial.time_s, callback.trial.verdict) == (1.0, None)


@pytest.mark.usefixtures("_sigint_afterwards")
def test_ctrl_c_suspends_trial(bench: FrameworkBench) -> None:
    with pytest.raises(type(bench.CTRL_C)) as raised:
        bench.training(bench.callback(), work=Work({2: KeyboardInterrupt()})).train()
    assert raised.value.args == bench.CTRL_C.args
    assert bench.only_trial().state is TrialState.SUSPENDED
