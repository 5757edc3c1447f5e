"""Launches that finish a missed run at the best known batch size, so that each launch ends with a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.frameworks import FrameworkBench, Work
from tests.support.job_bench import EPOCH_OF_24, EPOCH_OF_48, NEVER, NEXT_SIZE, SERVERS_SIZE
from zeus_plugins.protocol import EndReason, Origin, TrialState


def missing_at_24(bench: FrameworkBench, **options: Any) -> Any:
    """Return a callback with a trial at 24, after a run at 48 reached the target of 0.9."""
    job = bench.job(0.9, max_epochs=2)
    bench.complete_first_trial(job)
    return bench.callback(job, on_failure="finish", **options)


def test_missed_run_is_finished_at_best_known_size(bench: FrameworkBench) -> None:
    callback = missing_at_24(bench)
    training = bench.training(callback, epochs=2, scores=(0.1, 0.1, 0.1, 0.9))
    training.train()
    assert training.sizes == EPOCH_OF_24 * 2 + EPOCH_OF_48 * 2
    assert (callback.trial.batch_size, callback.trial.verdict.converged) == (SERVERS_SIZE, True)
    assert (callback.trial.epoch, callback.trial.time_s) == (2, 2.0)
    first, missed, finishing = bench.view().trials
    assert (missed.batch_size, missed.state, missed.epochs) == (NEXT_SIZE, TrialState.EXHAUSTED, 2)
    assert (finishing.batch_size, finishing.state, finishing.epochs) == (SERVERS_SIZE, TrialState.COMPLETED, 2)
    assert finishing.origin is Origin.FINISH
    assert finishing.reason == "finishes the run of trial 2, which ended at 24 without the target"
    # The rest of a run has no effect on the policy.
    arms = {arm.batch_size: arm.n for arm in bench.view().arms}
    assert arms[SERVERS_SIZE] == first.trial_number == 1
    assert training.left_behind(callback) == []
    assert training.script == (16, 1)


def test_second_miss_ends_launch_without_error(bench: FrameworkBench) -> None:
    callback = missing_at_24(bench)
    training = bench.training(callback, epochs=2, scores=(0.1,))
    training.train()
    assert training.sizes == EPOCH_OF_24 * 2 + EPOCH_OF_48 * 2
    assert not callback.trial.verdict.converged
    states = [trial.state for trial in bench.view().trials]
    assert states == [TrialState.COMPLETED, TrialState.EXHAUSTED, TrialState.EXHAUSTED]


def test_miss_at_own_size_of_user_ends_launch(bench: FrameworkBench) -> None:
    callback = bench.callback(bench.job(NEVER), on_failure="finish")
    training = bench.training(callback)
    training.train()
    assert training.sizes == EPOCH_OF_48
    assert callback.trial.verdict.reason is EndReason.MAX_EPOCHS_REACHED
    assert bench.only_trial().state is TrialState.EXHAUSTED


@pytest.mark.parametrize("diverges", [True, False])
def test_run_is_finished_from_last_weights_or_after_divergence_from_first(
    bench: FrameworkBench, diverges: bool
) -> None:
    seen: dict[str, Any] = {}

    def weights() -> torch.Tensor:
        return next(seen["model"].parameters())

    def diverge() -> None:
        weights().data.fill_(float("nan"))

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.update({name: weights().detach().clone()})

    callback = missing_at_24(bench)
    work = Work({1: note("first"), 2 * len(EPOCH_OF_24) + 1: note("again")} | ({3: diverge} if diverges else {}))
    training = bench.training(callback, work=work, epochs=2, scores=(0.1, 0.1, 0.9))
    seen["model"] = training.model
    training.train()
    assert torch.equal(seen["first"], seen["again"]) is diverges
    assert bool(weights().isfinite().all())
    assert callback.trial.verdict.converged


def test_learning_rates_of_rest_start_from_beginning(bench: FrameworkBench) -> None:
    rates: list[float] = []
    seen: dict[str, Any] = {}

    def note() -> None:
        optimizer = seen["trainer"].optimizers[0] if bench.HAS_LOGGER else seen["trainer"].optimizer
        rates.append(optimizer.param_groups[0]["lr"])

    callback = missing_at_24(bench, lr_scaling="linear")
    work = Work(dict.fromkeys(range(1, 2 * len(EPOCH_OF_24) + 2), note))
    training = bench.training(callback, work=work, epochs=2, scores=(0.1, 0.1, 0.9))
    seen["trainer"] = training.trainer
    training.train()
    # The script's own size in this job is 48: the rate at 48 is twice the rate at 24.
    assert rates[-1] == pytest.approx(2 * rates[0])


def test_run_without_server_is_finished_at_size_of_user(mortal_bench: FrameworkBench) -> None:
    bench, server = mortal_bench, mortal_bench.server
    callback = missing_at_24(bench)
    training = bench.training(callback, work=Work({2: server.kill}), epochs=2, scores=(0.1, 0.1, 0.9))
    training.train()
    assert training.sizes == EPOCH_OF_24 * 2 + EPOCH_OF_48
    assert callback.trial.verdict.converged
    server.start()
    bench.training(bench.callback(bench.job(0.9, max_epochs=2)), epochs=2, scores=(0.9,)).train()
    _, missed, finishing, _ = bench.view().trials
    assert (missed.batch_size, missed.state) == (NEXT_SIZE, TrialState.EXHAUSTED)
    assert (finishing.batch_size, finishing.state, finishing.origin) == (
        SERVERS_SIZE,
        TrialState.COMPLETED,
        Origin.FINISH,
    )
