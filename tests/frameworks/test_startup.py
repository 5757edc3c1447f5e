"""The start-up of a training: the time by which first steps are longer than later steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.support.frameworks import FrameworkBench, Work
from zeus_plugins.training import session
from zeus_plugins.training.startup import FirstSteps

SIZE = 8  # of 168 images: 21 steps in an epoch


class SlowStart(Work):
    """Batches that take a second each, but the first one 30 s; validations take 100 s."""

    def now_s(self) -> float:
        return self._count() + 29.0 * (self.batches > 0)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("options", [{}, {"validate_every": 14}], ids=["each epoch", "within epochs"])
def test_first_step_beyond_later_steps_is_reported_as_start_up(
    bench: FrameworkBench, monkeypatch: pytest.MonkeyPatch, accumulation: int, options: dict[str, Any]
) -> None:
    work = SlowStart()
    monkeypatch.setattr(session, "FirstSteps", partial(FirstSteps, work.now_s))
    job = bench.job(2.0, batch_sizes=(SIZE,), default_batch_size=SIZE, max_epochs=2)
    callback = bench.callback(job, on_failure="stop", energy_monitor=work.monitor)
    bench.training(
        callback, work=work, size=SIZE // accumulation, accumulation=accumulation, epochs=2, **options
    ).train()
    assert bench.only_trial().startup_s == 29.0
