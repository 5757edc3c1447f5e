"""Beside the batch-size callback, Lightning's trainings share what they measure of power limits through the server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from tests.support.job_bench import (
    NEVER,
    seconds_and_joules,
)
from tests.support.lightning_bench import (
    QUIET,
    Bench,
    make_bench,  # noqa: F401 - a fixture
    make_mortal_bench,  # noqa: F401 - a fixture
)
from tests.support.lightning_interrupted import interrupted
from tests.support.lightning_models import quiet_trainer, train_loader
from tests.support.lightning_powered import Powered
from tests.support.power_limit_bench import BEST_W, FOUND_W, LIMITS_W, is_as_the_table
from zeus_plugins import JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.lightning import ZeusBSOCallback, ZeusPowerLimitCallback
from zeus_plugins.power_limit import Energy

pytestmark = [
    *QUIET,
    # What interrupted and saved the first training has no place in the second.
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided:UserWarning"),
]

STEPS = 4  # of 48 in an epoch
# Each limit for one step: an epoch is enough for all of them.
AT_ONCE: dict[str, Any] = {"warmup_steps": 0, "profile_steps": 1}


def job(bench: Bench, **spec: Any) -> JobSpec:
    """Every training reaches its target after an epoch, and the next one has the same batch size."""
    return bench.job(**({"batch_sizes": (48,)} | spec))


def recur(
    bench: Bench, *others: Callback, is_first: bool = True, zeus: dict[str, Any] | None = None, **options: Any
) -> tuple[Powered, ZeusPowerLimitCallback]:
    """A recurrence with both callbacks; the power limit's is before the other, or after it."""
    module = Powered()
    power = module.callback(**(AT_ONCE | options))
    both: list[Callback] = [power, callback(bench, module, **(zeus or {}))]
    quiet_trainer(*(both if is_first else reversed(both)), *others).fit(module, train_loader())
    assert module.device_.limit_w() == FOUND_W
    return module, power


def callback(bench: Bench, module: Powered, **options: Any) -> ZeusBSOCallback:
    return bench.callback(job(bench), **({"energy_monitor": module.machine.monitor} | options))


def kept(bench: Bench) -> list[tuple[int, int]]:
    """Trial and number of limits of each profile that the server keeps."""
    with BsoClient(bench.server.url) as client:
        view = client._request("GET", f"/api/jobs/{bench.job_id}/power_profiles").json()
    return [(each["trial_number"], len(each["samples"])) for each in view["profiles"]]


def limits(bench: Bench) -> list[tuple[float | None, int | None]]:
    return [(trial.power_limit_w, trial.power_limits) for trial in bench.view().trials]


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_the_second_recurrence_measures_nothing(bench: Bench, is_first: bool) -> None:
    first, measured = recur(bench, is_first=is_first)
    assert first.limits_of_steps == list(LIMITS_W)
    assert is_as_the_table(measured.profile)
    second, known = recur(bench, is_first=is_first)
    assert second.limits_of_steps == [BEST_W] * STEPS
    assert known.profile == measured.profile
    assert kept(bench) == [(1, 4)]
    assert limits(bench) == [(BEST_W, 4)] * 2


def test_each_training_chooses_by_its_own_selector(bench: Bench) -> None:
    recur(bench)
    module, power = recur(bench, selector=Energy())
    assert module.limits_of_steps == [150.0] * STEPS
    assert power.chosen_limit_w == 150.0
    assert limits(bench) == [(BEST_W, 4), (150.0, 4)]


def test_only_missing_limits_are_measured(bench: Bench) -> None:
    recur(bench, limits_w=(150.0, 100.0))
    module, power = recur(bench)
    assert module.limits_of_steps == [250.0, 200.0, BEST_W, BEST_W]
    assert is_as_the_table(power.profile)
    fewer, _ = recur(bench, limits_w=(100.0, 150.0))
    assert fewer.limits_of_steps == [150.0] * STEPS
    assert kept(bench) == [(1, 2), (2, 4)]
    assert limits(bench) == [(150.0, 2), (BEST_W, 4), (150.0, 4)]


def test_trainings_too_short_for_all_limits_share_the_work(bench: Bench) -> None:
    tried = []
    for _ in range(5):
        module, _ = recur(bench, warmup_steps=1, profile_steps=2)
        tried.append(module.limits_of_steps)
    # A measurement takes three of an epoch's four steps.
    assert tried[:3] == [[250.0] * 3 + [200.0], [200.0] * 3 + [150.0], [150.0] * 3 + [100.0]]
    assert tried[3:] == [[100.0] * 3 + [BEST_W], [BEST_W] * STEPS]
    assert kept(bench) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert limits(bench) == [(None, 1), (None, 2), (None, 3), (BEST_W, 4), (BEST_W, 4)]


def test_what_a_file_knows_comes_to_the_server(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "{batch_size}.json"
    alone = Powered()
    quiet_trainer(alone.callback(profile_path=path, **AT_ONCE)).fit(alone, train_loader(48))
    first, _ = recur(bench, profile_path=path)
    assert first.limits_of_steps == [BEST_W] * STEPS
    assert kept(bench) == [(1, 4)]


def test_limits_of_other_devices_are_neither_kept_nor_taken(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = {"energy_monitor": seconds_and_joules(1.0, 10.0)}
    with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
        _, power = recur(bench, zeus=elsewhere)
    assert power.chosen_limit_w == BEST_W
    assert len([record for record in caplog.records if "measured on other devices" in record.message]) == 1
    assert kept(bench) == []
    assert limits(bench) == [(None, None)]


class KillServer(Callback):
    """At the first batch."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 0:
            self._bench.server.kill()


def test_limits_measured_while_the_server_is_away_come_later(mortal_bench: Bench) -> None:
    first, _ = recur(mortal_bench, KillServer(mortal_bench))
    assert first.limits_of_steps == list(LIMITS_W)
    mortal_bench.server.start()
    second, _ = recur(mortal_bench)
    assert second.limits_of_steps == [BEST_W] * STEPS
    assert kept(mortal_bench) == [(1, 4)]
    assert limits(mortal_bench) == [(BEST_W, 4)] * 2


def test_a_training_that_begins_without_the_server_leaves_its_limits(mortal_bench: Bench) -> None:
    mortal_bench.server.kill()
    offline, _ = recur(mortal_bench)
    assert offline.limits_of_steps == list(LIMITS_W)
    mortal_bench.server.start()
    second, _ = recur(mortal_bench)
    assert second.limits_of_steps == [BEST_W] * STEPS
    assert kept(mortal_bench) == [(1, 4)]
    assert limits(mortal_bench) == [(BEST_W, 4)] * 2


def test_a_resumed_training_measures_nothing(bench: Bench, tmp_path: Path) -> None:
    spec = job(bench, target=NEVER, max_epochs=2)

    def both(module: Powered) -> list[Callback]:
        zeus = bench.callback(spec, energy_monitor=module.machine.monitor, on_failure="stop")
        return [zeus, module.callback(**AT_ONCE)]

    first, second = Powered(), Powered()
    (checkpoint,) = interrupted(tmp_path, first, *both(first), epoch=1, max_epochs=2)
    quiet_trainer(*both(second), max_epochs=2).fit(second, train_loader(), ckpt_path=checkpoint)
    assert second.limits_of_steps == [BEST_W] * STEPS
    assert kept(bench) == [(1, 4)]
