"""Beside the batch-size callback, Trainers share what they measure of power limits through the server."""

from __future__ import annotations

import os
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

from transformers import Trainer

from tests.support.hf_bench import (
    Bench,
    make_bench,  # noqa: F401 - a fixture
    use_one_thread,  # noqa: F401 - a fixture
)
from tests.support.hf_powered import Powered
from tests.support.job_bench import (
    NEVER,
    seconds_and_joules,
)
from tests.support.power_limit_bench import BEST_W, FOUND_W, LIMITS_W, is_as_the_table
from zeus_plugins import JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.huggingface import ZeusPowerLimitTrainerCallback
from zeus_plugins.power_limit import Energy

STEPS = 4  # of 48 in an epoch
# Each limit for one step: an epoch is enough for all of them.
AT_ONCE: dict[str, Any] = {"warmup_steps": 0, "profile_steps": 1}


def job(bench: Bench, **spec: Any) -> JobSpec:
    """Every training reaches its target after an epoch, and the next one has the same batch size."""
    return bench.job(**({"batch_sizes": (48,)} | spec))


def recur(
    bench: Bench, way: str = "before", zeus: dict[str, Any] | None = None, **options: Any
) -> tuple[Powered, ZeusPowerLimitTrainerCallback]:
    """A recurrence with both callbacks, the power limit's given in this way."""
    model = Powered()
    power = model.callback(**(AT_ONCE | options))
    other = bench.callback(job(bench), **({"energy_monitor": model.machine.monitor} | (zeus or {})))
    given: dict[str, list[Any]] = {"before": [power, other], "after": [other, power], "attached": []}
    trainer: Trainer = model.trainer(bench.folder, *given[way], num_train_epochs=1)
    if way == "attached":
        other.attach(trainer)
        power.attach(trainer)
    trainer.train()
    assert model.device_.limit_w() == FOUND_W
    return model, power


def kept(bench: Bench) -> list[tuple[int, int]]:
    """Trial and number of limits of each profile that the server keeps."""
    with BsoClient(bench.server.url) as client:
        view = client._request("GET", f"/api/jobs/{bench.job_id}/power_profiles").json()
    return [(each["trial_number"], len(each["samples"])) for each in view["profiles"]]


def limits(bench: Bench) -> list[tuple[float | None, int | None]]:
    return [(trial.power_limit_w, trial.power_limits) for trial in bench.view().trials]


@pytest.mark.parametrize("way", ["before", "after", "attached"])
def test_the_second_recurrence_measures_nothing(bench: Bench, way: str) -> None:
    first, measured = recur(bench, way)
    assert first.limits_of_steps == list(LIMITS_W)
    assert is_as_the_table(measured.profile)
    second, known = recur(bench, way)
    assert second.limits_of_steps == [BEST_W] * STEPS
    assert known.profile == measured.profile
    assert kept(bench) == [(1, 4)]
    assert limits(bench) == [(BEST_W, 4)] * 2


def test_only_missing_limits_are_measured(bench: Bench) -> None:
    recur(bench, limits_w=(150.0, 100.0))
    model, power = recur(bench, selector=Energy())
    assert model.limits_of_steps == [250.0, 200.0, 150.0, 150.0]
    assert is_as_the_table(power.profile)
    assert kept(bench) == [(1, 2), (2, 4)]


def test_trainings_too_short_for_all_limits_share_the_work(bench: Bench) -> None:
    tried = [recur(bench, warmup_steps=1, profile_steps=2)[0].limits_of_steps for _ in range(5)]
    assert tried[:3] == [[250.0] * 3 + [200.0], [200.0] * 3 + [150.0], [150.0] * 3 + [100.0]]
    assert tried[3:] == [[100.0] * 3 + [BEST_W], [BEST_W] * STEPS]
    assert limits(bench) == [(None, 1), (None, 2), (None, 3), (BEST_W, 4), (BEST_W, 4)]


def test_limits_of_other_devices_are_neither_kept_nor_taken(bench: Bench) -> None:
    _, power = recur(bench, zeus={"energy_monitor": seconds_and_joules(1.0, 10.0)})
    assert power.chosen_limit_w == BEST_W
    assert kept(bench) == []
    assert limits(bench) == [(None, None)]


def test_a_resumed_training_measures_nothing(bench: Bench) -> None:
    spec = job(bench, target=NEVER, max_epochs=2)
    options = {"num_train_epochs": 2, "save_strategy": "epoch"}

    def train(model: Powered, **how: Any) -> None:
        zeus = bench.callback(spec, energy_monitor=model.machine.monitor, on_failure="stop")
        model.trainer(bench.folder, zeus, model.callback(**AT_ONCE), **options).train(**how)

    with pytest.raises(KeyboardInterrupt):
        train(Powered(KeyboardInterrupt(), fails_at=STEPS + 2))
    resumed = Powered()
    train(resumed, resume_from_checkpoint=True)
    assert resumed.limits_of_steps == [BEST_W] * STEPS
    assert kept(bench) == [(1, 4)]
