"""Two ranks that train together agree on one power limit; tests/power_limit/test_processes.py has real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_trainer import FakeTrainer, on_each_rank
from tests.support.power_limit_bench import (
    FOUND_W,
    LIMITS_W,
    TABLE,
    Breaks,
    Forbidden,
    ReplayMachine,
    ReplayPoint,
    profiler,
)
from tests.support.reporting import warnings_in
from zeus_plugins.power_limit import Energy, PowerLimitProfile

WARMED_AND_MEASURED = [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 3

# The second rank's GPU is slow under low limits: the first rank would choose 150 W, both together choose 200 W.
SLOW = TABLE | {100.0: ReplayPoint(4.0, 80.0), 150.0: ReplayPoint(3.0, 125.0)}
STEPS = 14


def play(scene: str, known: PowerLimitProfile | None = None) -> list[Any]:
    """Let both ranks play a scene; return the observations of each."""

    def train(port: FakeTrainer) -> dict[str, Any]:
        is_second = port.rank == 1
        model = "V100" if scene == "other GPUs" and is_second else "A40"
        where = ReplayMachine(SLOW if is_second else TABLE, gpu_model=model)
        options: dict[str, Any] = {"devices": where.devices, "monitor": where.monitor}
        if is_second:
            match scene:
                case "the second follows":
                    options = {"devices": None, "monitor": None}
                case "the second may not":
                    options["devices"] = [Forbidden()]
                case "the second breaks":
                    options["devices"] = [Breaks(where.devices[0], 2)]
                case "the second was capped":
                    where.devices[0].set_limit_w(200.0)
                    # The default, every 25 W below the found limit, has more limits than the table.
        limits_w = None if scene == "the second was capped" else LIMITS_W
        zeus = profiler(
            where,
            Energy(),
            limits_w=limits_w,
            profile=None if is_second else known,
            all_gather=port.all_gather,
            **options,
        )
        seen_w: list[float] = []
        zeus.on_epoch_begin()
        for step in range(STEPS):
            seen_w.append(where.devices[0].limit_w())
            where.train()
            if scene == "the second leaves" and step == 4:
                break
            zeus.on_step_end()
        if scene != "the second leaves" or is_second:
            zeus.close()
        return {
            "limits_w": seen_w,
            "chosen_limit_w": zeus.chosen_limit_w,
            "profile": zeus.profile,
            "limit_w_after": where.devices[0].limit_w(),
        }

    ends = on_each_rank(2, train)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return ends


def sample(story: dict[str, Any], limit_w: float) -> tuple[float, float]:
    """Return seconds and joules of a step."""
    (found,) = story["profile"].only([limit_w]).samples
    return found.time_per_step_s, found.energy_per_step_j


def test_all_ranks_measure_together_and_choose_the_same_limit() -> None:
    first, second = play("all goes well")
    assert first["limits_w"] == second["limits_w"] == [*WARMED_AND_MEASURED, 200.0, 200.0]
    assert first["chosen_limit_w"] == second["chosen_limit_w"] == 200.0
    assert first["profile"] == second["profile"]
    # The longer of the times; the sum of the energies: 1.2 s · 125 W + 3 s · 125 W.
    assert sample(first, 150.0) == pytest.approx((3.0, 525.0))
    assert first["profile"].gpus.max_power == 500.0
    assert first["limit_w_after"] == second["limit_w_after"] == FOUND_W


def test_rank_without_separate_gpus_follows() -> None:
    first, second = play("the second follows")
    assert first["chosen_limit_w"] == second["chosen_limit_w"] == 150.0
    assert first["profile"] == second["profile"]
    assert sample(first, 150.0) == pytest.approx((1.2, 150.0))
    assert second["limits_w"] == [FOUND_W] * 14


def test_missing_permission_on_a_rank_prevents_changes_on_all(caplog: pytest.LogCaptureFixture) -> None:
    first, second = play("the second may not")
    assert first["limits_w"] == [FOUND_W] * 14
    assert first["chosen_limit_w"] is second["chosen_limit_w"] is first["profile"] is None
    assert len(warnings_in(caplog)) == 2
    assert all("Insufficient Permissions" in warning for warning in warnings_in(caplog))


def test_failure_on_a_rank_ends_the_profiling_on_all(caplog: pytest.LogCaptureFixture) -> None:
    first, second = play("the second breaks")
    # It fails to set the second limit, and both keep the first.
    assert first["limits_w"] == second["limits_w"] == [FOUND_W] * 14
    assert first["chosen_limit_w"] == second["chosen_limit_w"] == FOUND_W
    assert "GPU is lost" in warnings_in(caplog)[0]


def test_no_rank_exceeds_the_lowest_initial_limit() -> None:
    first, second = play("the second was capped")
    assert first["limits_w"][:3] == second["limits_w"][:3] == [200.0] * 3
    assert (first["limit_w_after"], second["limit_w_after"]) == (250.0, 200.0)


def test_gpus_of_several_models_are_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    first, second = play("other GPUs")
    assert first["limits_w"] == second["limits_w"] == [FOUND_W] * 14
    assert "of several models (A40, V100)" in warnings_in(caplog)[0]


def test_limits_known_to_the_first_rank_are_used_by_all() -> None:
    first, second = play("known", play("all goes well")[0]["profile"])
    assert first["limits_w"] == second["limits_w"] == [200.0] * 14


def test_departing_rank_restores_the_limit_without_waiting() -> None:
    first, second = play("the second leaves")
    assert (first["limit_w_after"], second["limit_w_after"]) == (200.0, FOUND_W)
