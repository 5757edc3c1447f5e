"""A training tries power limits while it trains, keeps the best, and leaves the GPUs unchanged."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.frameworks import STEPS_OF_16, FrameworkBench, Powered
from tests.support.power_limit_bench import BEST_W, FOUND_W, LIMITS_W, is_as_the_table
from zeus_plugins.errors import ZeusBSOConfigError


def train(bench: FrameworkBench, epochs: int = 2, work: Powered | None = None, **options: Any) -> tuple[Powered, Any]:
    """Return the work of a training with a power-limit callback of these options, and the callback."""
    work = work or Powered()
    callback = bench.PowerLimit(**work.options(**options))
    bench.training(callback, work=work, epochs=epochs).train()
    return work, callback


def test_best_limit_is_found_within_epochs_and_kept_until_end(bench: FrameworkBench) -> None:
    work = Powered()
    callback = bench.PowerLimit(**work.options())
    training = bench.training(callback, work=work, epochs=3)
    training.train()
    assert callback.chosen_limit_w == BEST_W
    assert is_as_the_table(callback.profile)
    # Each limit takes 3 steps. The first epoch ends within the measurement of the fourth limit, which then starts
    # again.
    first = [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 2
    second = [100.0] * 3 + [BEST_W] * 8
    assert work.limits_of_steps == first + second + [BEST_W] * STEPS_OF_16
    # The validations before the training and after the first epoch come first, then the validations under the chosen
    # limit.
    assert work.limits_of_validations == [FOUND_W] * bench.SANITY_CHECKS + [FOUND_W, BEST_W, BEST_W]
    assert work.device.limit_w() == FOUND_W
    assert training.logged("zeus/power_limit_w") == [{"zeus/power_limit_w": BEST_W}]
    assert training.left_behind(callback) == []


@pytest.mark.parametrize("steps", [2, 4, 5])
def test_validations_within_epoch_are_not_measured(bench: FrameworkBench, steps: int) -> None:
    work = Powered()
    callback = bench.PowerLimit(**work.options())
    bench.training(callback, work=work, epochs=3, validate_every=steps).train()
    assert len(work.limits_of_validations) > 4
    assert is_as_the_table(callback.profile)


def test_checkpoints_are_not_measured(bench: FrameworkBench) -> None:
    work = Powered()
    callback = bench.PowerLimit(**work.options())
    bench.training(bench.slow_saver(work), callback, work=work, epochs=3, save_every=5).train()
    assert is_as_the_table(callback.profile)


@pytest.mark.parametrize(
    "error", [RuntimeError("the user's own"), SystemExit(3), KeyboardInterrupt()], ids=["error", "exit", "ctrl-c"]
)
@pytest.mark.usefixtures("_sigint_afterwards")
def test_exception_restores_limit(bench: FrameworkBench, error: BaseException) -> None:
    work = Powered({5: error})
    with pytest.raises(type(bench.CTRL_C) if isinstance(error, KeyboardInterrupt) else type(error)):
        train(bench, work=work)
    assert work.limits_of_steps[-1] == 200.0
    assert work.device.limit_w() == FOUND_W


def test_training_continues_without_gpu(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", "65")
    callback = bench.PowerLimit(warmup_steps=1, profile_steps=2)
    with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
        bench.training(callback).train()
    assert callback.chosen_limit_w is callback.profile is None
    (warning,) = [record.message for record in caplog.records if "power limit" in record.message]
    assert warning.endswith("continues without a limit of ours: the training runs on no NVIDIA GPU")


def test_limits_outside_range_of_gpus_are_refused(bench: FrameworkBench) -> None:
    with pytest.raises(ZeusBSOConfigError, match=r"limits_w has \[300.0\].*they take 100 W to 250 W"):
        train(bench, limits_w=(300.0, 200.0))


def test_second_training_measures_all_limits_again(bench: FrameworkBench) -> None:
    work = Powered()
    callback = bench.PowerLimit(**work.options())
    for _ in range(2):
        work.limits_of_steps.clear()
        bench.training(callback, work=work, epochs=2).train()
        assert set(work.limits_of_steps) == set(LIMITS_W)
        assert work.device.limit_w() == FOUND_W
