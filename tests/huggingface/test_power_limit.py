"""Power limits in cases of the Trainer's own: accumulated batches and existing trainers."""

from __future__ import annotations

import pytest

from tests.support.frameworks import Powered
from tests.support.hf_bench import Bench
from tests.support.power_limit_bench import FOUND_W, TABLE
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
