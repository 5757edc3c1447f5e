"""How real trainings end their trials: by the server's verdict, too early, or after an error."""

from __future__ import annotations

import pytest
import torch

from tests.support.frameworks import FrameworkBench, Work
from tests.support.job_bench import EPOCH_OF_48, SERVERS_SIZE, seconds_and_joules
from zeus_plugins.protocol import GP_VOI, ZEUS, EndReason, TrialState

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


def test_estimate_is_named_on_machine_without_counter(bench: FrameworkBench) -> None:
    callback = bench.BatchSize(bench.job(higher_is_better_metric=True), "score", server_url=bench.server.url)
    bench.training(callback).train()
    assert callback.trial.time_s > 0
    assert callback.trial.energy_j > 0
    assert callback.trial.energy_source.startswith("estimate: ")
    assert bench.only_trial().energy_source == callback.trial.energy_source


@pytest.mark.parametrize(
    ("policy", "other_size", "reason"),
    [(ZEUS, 24, EndReason.COST_BOUND_CROSSED), (GP_VOI, 96, EndReason.EPOCH_BOUND_REACHED)],
)
def test_trial_above_cost_bound_is_stopped_early(
    bench: FrameworkBench, policy: str, other_size: int, reason: EndReason
) -> None:
    job = bench.job(0.9, batch_sizes=tuple(sorted((SERVERS_SIZE, other_size))), max_epochs=4, policy=policy)
    bench.complete_first_trial(job)  # The first trial costs 55 J, so the bound is 110 J.
    callback = bench.callback(job, energy_monitor=seconds_and_joules(1.0, 30.0), on_failure="stop")
    training = bench.training(callback, epochs=4, scores=(0.1,))
    training.train()  # Each epoch costs 65 J.
    assert training.epochs == 2
    assert callback.trial.verdict.reason is reason
    last = bench.view().trials[-1]
    assert (last.batch_size, last.state, last.cost_j) == (other_size, TrialState.EARLY_STOPPED, 130.0)


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


def test_dead_server_does_not_hide_error_of_user(mortal_bench: FrameworkBench) -> None:
    error = RuntimeError("the user's own")
    work = Work({1: mortal_bench.server.kill, 2: error})
    with pytest.raises(RuntimeError) as raised:
        mortal_bench.training(mortal_bench.callback(), work=work).train()
    assert raised.value is error


def test_server_killed_between_epochs_loses_no_report(mortal_bench: FrameworkBench) -> None:
    server = mortal_bench.server

    def fail_for_a_moment() -> None:
        server.kill()
        server.start()

    callback = mortal_bench.callback(mortal_bench.job(0.9, max_epochs=4))
    work = Work({len(EPOCH_OF_48) + 1: fail_for_a_moment})
    mortal_bench.training(callback, work=work, epochs=4, scores=(0.1, 0.2, 0.9)).train()
    trial = mortal_bench.only_trial()
    assert (trial.state, trial.epochs, trial.batch_size) == (TrialState.COMPLETED, 3, SERVERS_SIZE)
    assert (trial.time_s, trial.energy_j) == (3.0, 30.0)
