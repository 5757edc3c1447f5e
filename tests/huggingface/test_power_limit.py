"""Power limits in cases of the Trainer's own: accumulated batches and existing trainers."""

from __future__ import annotations

import pytest

from tests.support.frameworks import Powered
from tests.support.hf_bench import Bench
from tests.support.power_limit_bench import BEST_W, FOUND_W, LIMITS_W, TABLE
from zeus_plugins.huggingface import ZeusPowerLimitTrainerCallback


def test_accumulated_batches_are_single_step(bench: Bench) -> None:
    work = Powered()
    callback = ZeusPowerLimitTrainerCallback(**work.options())
    bench.training(callback, work=work, epochs=5, accumulation=2).train()
    assert callback.profile is not None
    assert [sample.steps for sample in callback.profile.samples] == [2] * 4
    # The last step of an epoch accumulates a single batch.
    assert callback.profile.samples[-1].time_per_step_s == pytest.approx(2 * TABLE[FOUND_W].time_per_step_s)
    assert callback.profile.batch_size == 32


def test_existing_trainer_shares_limits_through_server(bench: Bench) -> None:
    limits_of_steps = []
    for _ in range(2):
        work = Powered()
        run = bench.training(work=work)
        bench.callback(bench.job(batch_sizes=(48,)), energy_monitor=work.monitor).attach(run.trainer)
        callback = ZeusPowerLimitTrainerCallback(**work.options(warmup_steps=0, profile_steps=1))
        callback.attach(run.trainer)
        run.train()
        assert callback.chosen_limit_w == BEST_W
        limits_of_steps.append(work.limits_of_steps)
    assert limits_of_steps == [list(LIMITS_W), [BEST_W] * 4]
    assert bench.power_profiles() == [(1, 4)]
    assert bench.power_limits() == [(BEST_W, 4)] * 2
