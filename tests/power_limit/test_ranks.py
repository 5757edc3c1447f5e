"""Two real processes that train together agree on one power limit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.power_limit_bench import FOUND_W
from tests.support.ranks import stories_of
from tests.support.warm import LIGHTNING

WARMED_AND_MEASURED = [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 3


@pytest.fixture(scope="module", name="stories")
def play_all_scenes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the observations of both ranks in each scene."""
    return stories_of("tests.support.power_limit_ranks", tmp_path_factory.mktemp("ranks"), modules=LIGHTNING)


def sample(story: dict[str, Any], limit_w: float) -> tuple[float, float]:
    """Return seconds and joules of a step."""
    (found,) = (each for each in story["profile"]["samples"] if each["limit_w"] == limit_w)
    return found["time_s"] / found["steps"], found["energy_j"] / found["steps"]


def test_all_ranks_measure_together_and_choose_the_same_limit(stories: list[dict[str, Any]]) -> None:
    first, second = (story["all goes well"] for story in stories)
    assert first["limits_w"] == second["limits_w"] == [*WARMED_AND_MEASURED, 200.0, 200.0]
    assert first["chosen_limit_w"] == second["chosen_limit_w"] == 200.0
    assert first["profile"] == second["profile"]
    # The longer of the times; the sum of the energies: 1.2 s · 125 W + 3 s · 125 W.
    assert sample(first, 150.0) == pytest.approx((3.0, 525.0))
    assert first["profile"]["gpus"]["max_power"] == 500.0
    assert first["limit_w_after"] == second["limit_w_after"] == FOUND_W


def test_rank_without_separate_gpus_follows(stories: list[dict[str, Any]]) -> None:
    first, second = (story["the second follows"] for story in stories)
    assert first["chosen_limit_w"] == second["chosen_limit_w"] == 150.0
    assert first["profile"] == second["profile"]
    assert sample(first, 150.0) == pytest.approx((1.2, 150.0))
    assert second["limits_w"] == [FOUND_W] * 14


def test_missing_permission_on_a_rank_prevents_changes_on_all(stories: list[dict[str, Any]]) -> None:
    first, second = (story["the second may not"] for story in stories)
    assert first["limits_w"] == [FOUND_W] * 14
    assert first["chosen_limit_w"] is second["chosen_limit_w"] is None
    assert first["profile"] == second["profile"]
    assert [each["limit_w"] for each in first["profile"]["samples"]] == [200.0]
    assert len(first["warnings"]) == len(second["warnings"]) == 1
    assert "Insufficient Permissions" in first["warnings"][0]


def test_failure_on_a_rank_ends_the_profiling_on_all(stories: list[dict[str, Any]]) -> None:
    first, second = (story["the second breaks"] for story in stories)
    # It fails to set the third limit, and both restore immediately.
    assert first["limits_w"] == second["limits_w"] == [250.0] * 3 + [200.0] * 3 + [FOUND_W] * 8
    assert first["chosen_limit_w"] is second["chosen_limit_w"] is None
    assert "GPU is lost" in first["warnings"][0]


def test_no_rank_exceeds_the_lowest_initial_limit(stories: list[dict[str, Any]]) -> None:
    first, second = (story["the second was capped"] for story in stories)
    assert first["limits_w"][:3] == second["limits_w"][:3] == [200.0] * 3
    assert (first["limit_w_after"], second["limit_w_after"]) == (250.0, 200.0)


def test_gpus_of_several_models_are_not_changed(stories: list[dict[str, Any]]) -> None:
    first, second = (story["other GPUs"] for story in stories)
    assert first["limits_w"] == second["limits_w"] == [FOUND_W] * 14
    assert "of several models (A40, V100)" in first["warnings"][0]


def test_limits_known_to_the_first_rank_are_used_by_all(stories: list[dict[str, Any]]) -> None:
    first, second = (story["known"] for story in stories)
    assert first["limits_w"] == second["limits_w"] == [200.0] * 14


def test_departing_rank_restores_the_limit_without_waiting(stories: list[dict[str, Any]]) -> None:
    first, second = (story["the second leaves"] for story in stories)
    assert (first["limit_w_after"], second["limit_w_after"]) == (200.0, FOUND_W)
