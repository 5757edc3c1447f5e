"""Selectors, states and profiles with literal numbers, and the profiler on a simulated machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.power_limit_bench import (
    BEST_W,
    FOUND_W,
    LIMITS_W,
    MOVES,
    TABLE,
    Breaks,
    Failing,
    Forbidden,
    ReplayMachine,
    machine,
    profiler,
    train,
)
from tests.support.reporting import warnings_in
from zeus_plugins.energy import Measurement
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError
from zeus_plugins.power_limit import (
    Energy,
    MaxSlowdown,
    OptimumSelector,
    PowerLimitProfile,
    PowerLimitSample,
    Time,
    ZeusCost,
)
from zeus_plugins.power_limit.plan import Done, Profiling, Ready, Warmup, Window
from zeus_plugins.protocol import GpuConfig

GPUS = GpuConfig(max_power=250.0, number_of_gpus=1, gpu_model="V100")


@pytest.fixture(name="where")
def one_gpu() -> ReplayMachine:
    return machine()


def profile(**options: Any) -> PowerLimitProfile:
    samples = [
        PowerLimitSample(
            limit_w=limit_w,
            steps=10,
            time_s=10 * point.time_per_step_s,
            energy_j=10 * point.time_per_step_s * point.average_power_w,
        )
        for limit_w, point in TABLE.items()
    ]
    return PowerLimitProfile(**({"gpus": GPUS, "samples": samples} | options))


# Selectors; see the table for the numbers


@pytest.mark.parametrize(
    ("selector", "limit_w"),
    [
        (Energy(), 150.0),
        (Time(), 250.0),
        (ZeusCost(1.0), 150.0),
        (ZeusCost(0.5), 200.0),
        (ZeusCost(0.0), 250.0),
        (MaxSlowdown(1.0), 250.0),
        (MaxSlowdown(1.05), 250.0),
        (MaxSlowdown(1.06), 200.0),
        (MaxSlowdown(1.3), 150.0),
        (MaxSlowdown(3.0), 100.0),
    ],
)
def test_selectors_choose_the_literal_limits(selector: OptimumSelector, limit_w: float) -> None:
    assert selector.select(profile()) == limit_w


@pytest.mark.parametrize("selector", [Energy(), Time(), ZeusCost(0.5), MaxSlowdown(1.0)])
def test_lowest_of_equal_limits_is_chosen(selector: OptimumSelector) -> None:
    alike = [PowerLimitSample(limit_w=limit_w, steps=5, time_s=1.0, energy_j=9.0) for limit_w in (200, 100, 150)]
    assert selector.select(profile(samples=alike)) == 100.0


@pytest.mark.parametrize(
    ("selector", "wrong", "problem"),
    [(ZeusCost, wrong, "from 0 .* to 1") for wrong in (-0.1, 1.1, float("nan"))]
    + [(MaxSlowdown, wrong, "1 or more") for wrong in (0.9, float("inf"), float("nan"))],
)
def test_invalid_selector_is_refused(selector: Any, wrong: float, problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        selector(wrong)


@pytest.mark.parametrize(
    ("steps", "fitted"),
    [(50, Window(10, 40)), (49, Window(10, 39)), (20, Window(4, 16)), (1, Window(0, 1)), (0, Window(0, 1))],
)
def test_windows_shrink_to_the_steps_of_an_epoch(steps: int, fitted: Window) -> None:
    assert Window(10, 40).fitted(steps) == fitted


# States


def test_documented_diagram_shows_exactly_the_transitions() -> None:
    diagram = (ROOT / "docs" / "power-limit.md").read_text().partition("```mermaid")[2].partition("```")[0]
    drawn = set(re.findall(r"^ *(\w+) --> (\w+)", diagram, re.MULTILINE))
    assert drawn == {(old.__name__, new.__name__) for old, news in MOVES.items() for new in news}


# Profiles


def test_profile_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    profile(batch_size=64).save(path)
    assert PowerLimitProfile.load(path) == profile(batch_size=64)
    first = json.loads(path.read_text())["samples"][0]
    assert first == {"limit_w": 100.0, "steps": 10, "time_s": 20.0, "energy_j": 1600.0, "source": ""}


def test_failed_save_is_reported_and_preserves_the_old_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("No space left on device")))
    profile(batch_size=64).save(path)
    assert warnings_in(caplog) == ["the power-limit profile could not be saved: No space left on device"]
    assert PowerLimitProfile.load(path) == profile()
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"gpus": {"max_power": 1}}'])
def test_invalid_profile_is_reported_and_not_used(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert PowerLimitProfile.load(path) is PowerLimitProfile.load(tmp_path / "absent.json") is None
    (warning,) = warnings_in(caplog)
    assert f"the power limits are measured again: {path} holds no power-limit profile" in warning


def test_limit_measured_twice_is_refused() -> None:
    twice = profile().samples[:1] * 2
    with pytest.raises(ValueError, match="two entries have the same limit_w"):
        profile(samples=twice)


def test_later_sample_of_a_limit_replaces_the_earlier_sample() -> None:
    later = PowerLimitSample(limit_w=150.0, steps=1, time_s=1.0, energy_j=1.0)
    assert profile().with_sample(later).limits_w == (100.0, 150.0, 200.0, 250.0)
    assert profile().with_sample(later).samples[1] == later


# The profiler


@pytest.mark.parametrize("number_of_gpus", [1, 3])
def test_each_limit_is_measured_and_the_best_kept_on_all_gpus(number_of_gpus: int) -> None:
    where = machine(number_of_gpus)
    zeus = profiler(where)
    assert train(where, zeus, 14) == [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 3 + [BEST_W] * 2
    assert (zeus.chosen_limit_w, zeus.state) == (BEST_W, Done())
    assert zeus.profile is not None
    assert {sample.limit_w: sample.steps for sample in zeus.profile.samples} == dict.fromkeys(TABLE, 2)
    assert zeus.profile.gpus.max_power == 250.0 * number_of_gpus
    sample = zeus.profile.samples[0]
    assert sample.energy_j / sample.time_s == pytest.approx(80.0 * number_of_gpus)
    assert [device.limit_w() for device in where.devices] == [BEST_W] * number_of_gpus
    zeus.close()
    assert [device.limit_w() for device in where.devices] == [FOUND_W] * number_of_gpus


def test_between_epochs_the_found_limit_applies_and_an_interrupted_measurement_restarts(where: ReplayMachine) -> None:
    zeus = profiler(where)
    train(where, zeus, 5)
    assert (zeus.state, where.devices[0].limit_w()) == (Ready(1), FOUND_W)
    assert train(where, zeus, 4) == [200.0] * 3 + [150.0]


def test_known_limits_are_not_measured_again(where: ReplayMachine) -> None:
    known = profile(gpus=where.monitor.gpus(), batch_size=64)
    zeus = profiler(where, profile=known, batch_size=64)
    assert train(where, zeus) == [BEST_W] * 12
    assert zeus.profile == known
    zeus = profiler(where, profile=known.only([100.0, 200.0, 250.0]), batch_size=64)
    assert train(where, zeus, 4) == [150.0] * 3 + [BEST_W]
    zeus.close()


@pytest.mark.parametrize("other", [{"batch_size": 32}, {"gpus": GPUS}], ids=["size", "GPUs"])
def test_profile_of_a_different_size_or_gpu_is_not_used(other: dict[str, Any], where: ReplayMachine) -> None:
    known = profile(**({"gpus": where.monitor.gpus(), "batch_size": 64} | other))
    zeus = profiler(where, profile=known, batch_size=64)
    assert train(where, zeus)[:12] == [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 3
    zeus.close()


def test_known_epochs_shrink_the_windows(where: ReplayMachine) -> None:
    zeus = profiler(where, warmup_steps=10, profile_steps=40)
    zeus.on_epoch_begin(5)
    assert zeus.state == Warmup(0, 1)
    for steps, state in ((1, Profiling(0)), (4, Warmup(1, 1))):
        where.train(steps)
        zeus.on_step_end(steps)
        assert zeus.state == state
    assert zeus.profile is not None
    assert zeus.profile.samples[0].steps == 4


def test_epochs_of_unknown_length_shrink_the_windows_after_the_first_epoch(where: ReplayMachine) -> None:
    zeus = profiler(where, warmup_steps=10, profile_steps=40)
    train(where, zeus, steps=5, epochs=5)
    assert zeus.chosen_limit_w == BEST_W
    zeus.close()


def test_queued_work_is_awaited_at_both_ends_of_a_window(where: ReplayMachine) -> None:
    seen: list[float] = []
    zeus = profiler(where, synchronize=lambda: seen.append(where.time_s))
    train(where, zeus, 6)
    assert seen == [pytest.approx(time_s) for time_s in (0.95, 2.85, 3.85, 5.85)]
    zeus.close()


def test_unmeasured_choice_is_an_error_and_leaves_no_limit(where: ReplayMachine) -> None:
    odd: Any = SimpleNamespace(select=lambda _: 123.0)
    zeus = profiler(where, odd)
    with pytest.raises(ZeusBSOBadOperationError, match="none of the limits measured"):
        train(where, zeus)
    assert where.devices[0].limit_w() == FOUND_W


# Failing devices and monitors


# The device takes the limit in force, as a test, and then 250 W, 200 W and so on.
@pytest.mark.parametrize(("takes", "chosen_w"), [(1, None), (2, 250.0), (3, 200.0), (4, 200.0)])
def test_device_failing_later_ends_the_profiling_but_not_the_training(
    takes: int, chosen_w: float | None, caplog: pytest.LogCaptureFixture, where: ReplayMachine
) -> None:
    zeus = profiler(where, devices=[Breaks(where.devices[0], takes)])
    limits_w = train(where, zeus, epochs=2)
    assert limits_w[-1] == (chosen_w or FOUND_W)
    assert (zeus.chosen_limit_w, zeus.is_done) == (chosen_w, True)
    (warning,) = warnings_in(caplog)
    outcomes = {
        None: "no power limit is chosen, and the training continues without a limit of ours: GPU is lost",
        chosen_w or 0.0: "GPU is lost: no further limits are tried",
    }
    assert warning == outcomes[chosen_w]
    zeus.close()


def test_device_unable_to_set_the_chosen_limit_has_the_found_limit(
    caplog: pytest.LogCaptureFixture, where: ReplayMachine
) -> None:
    zeus = profiler(where, devices=[Breaks(where.devices[0], takes=5)])
    assert train(where, zeus, epochs=2)[-1] == FOUND_W
    assert (zeus.chosen_limit_w, zeus.is_done) == (None, True)
    assert warnings_in(caplog)[-1].endswith("continues without a limit of ours: GPU is lost")


def test_failed_restore_is_reported_with_a_remedy(caplog: pytest.LogCaptureFixture, where: ReplayMachine) -> None:
    device = Breaks(where.devices[0], 6, refuses=2)
    zeus = profiler(where, devices=[device])
    train(where, zeus)
    assert device.takes == 0
    zeus.close()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "the power limit of GPU 0 could not be restored to 250 W (GPU is lost): set it, e.g. with nvidia-smi -pl 250"
    ]
    assert warnings_in(caplog) == []


def test_without_permission_nothing_is_changed(caplog: pytest.LogCaptureFixture, where: ReplayMachine) -> None:
    device = Forbidden()
    zeus = profiler(where, devices=[device])
    train(where, zeus, epochs=2)
    assert device.asked == [200.0]
    assert zeus.chosen_limit_w is zeus.profile is None
    (warning,) = warnings_in(caplog)
    assert warning.endswith("continues without a limit of ours: Insufficient Permissions")


@pytest.mark.parametrize(
    ("fails_at", "problem"),
    [(call, "the counter is gone") for call in ("gpus", "begin", "end")] + [("", "a measurement makes no sense")],
)
def test_failing_monitor_ends_the_profiling_but_not_the_training(
    fails_at: str, problem: str, caplog: pytest.LogCaptureFixture, where: ReplayMachine
) -> None:
    zeus = profiler(where, monitor=Failing(where, fails_at, measurement=Measurement(0.0, 0.0, "odd")))
    assert train(where, zeus)[-1] == FOUND_W
    (warning,) = warnings_in(caplog)
    assert warning.startswith(
        f"no power limit is chosen, and the training continues without a limit of ours: {problem}"
    )


def test_failed_measurement_of_a_limit_is_repeated(where: ReplayMachine) -> None:
    zeus = profiler(where, monitor=Failing(where, "end", only=2))
    train(where, zeus, 3 * len(LIMITS_W) + 2)
    assert zeus.chosen_limit_w == BEST_W
    assert zeus.profile is not None
    assert zeus.profile.limits_w == tuple(sorted(LIMITS_W))
    zeus.close()
