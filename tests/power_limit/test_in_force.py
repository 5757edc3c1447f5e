"""Clamped, ignored, overruled and left-behind limits, and permissions to set them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.power_limit_bench import ANY_LENGTH, ReplayMachine, ReplayPoint, record_limit
from tests.support.reporting import warnings_in
from zeus_plugins.placement import process_start
from zeus_plugins.power_limit import (
    Energy,
    MaxSlowdown,
    NvmlDevice,
    PowerLimitProfiler,
    PowerLimitUnavailableError,
    Time,
    ZeusCost,
)
from zeus_plugins.power_limit.devices import set_and_check
from zeus_plugins.power_limit.guard import LimitGuard, forget, recall, remember


def device_of(**of_gpu: Any) -> tuple[NvmlDevice, FakeGpu]:
    gpu = FakeGpu(**of_gpu)
    return NvmlDevice("GPU-0", 0, "GPU 0 (H200)", FakeNvml([gpu])), gpu


# A lower limit prolongs each step, which draws the permitted power. Cost at η = 0.5 with a maximum of 700 W: 700 W
# 1.0·(350+350) = 700 J, 600 W 1.02·650 = 663 J, 500 W 1.1·600 = 660 J, 400 W 1.4·550 = 770 J, 300 W 1.7·500 = 850 J,
# 200 W 2.6·450 = 1170 J
TABLE = {
    700.0: ReplayPoint(1.0, 700.0),
    600.0: ReplayPoint(1.02, 600.0),
    500.0: ReplayPoint(1.1, 500.0),
    400.0: ReplayPoint(1.4, 400.0),
    300.0: ReplayPoint(1.7, 300.0),
    200.0: ReplayPoint(2.6, 200.0),
}


class Replayed:
    """A GPU of NVML with a training that costs the values of the table."""

    def __init__(self, **of_gpu: Any) -> None:
        self.device, self.gpu = device_of(**of_gpu)
        self._where = ReplayMachine(TABLE)
        self.meddle: Callable[[float], None] = lambda _: None  # called within a step, with the limit at its start

    def profiler(self, selector: Any = None, **options: Any) -> PowerLimitProfiler:
        where = self._where
        return PowerLimitProfiler(
            [self.device],
            selector or ZeusCost(0.5),
            warmup_steps=0,
            profile_steps=1,
            monitor=where.monitor,
            **(ANY_LENGTH | {"limits_w": list(TABLE)} | options),
        )

    def train(self, zeus: PowerLimitProfiler, steps: int, *, ends: bool = True) -> list[float]:
        limits_w = []
        zeus.on_epoch_begin()
        for _ in range(steps):
            assert self.gpu.limit_mw is not None
            limits_w.append(self.gpu.limit_mw / 1000)
            self.meddle(limits_w[-1])
            in_force_w = self.gpu.limit_mw / 1000
            self._where.devices[0].set_limit_w(min(TABLE, key=lambda limit_w: abs(limit_w - in_force_w)))
            self._where.train()
            zeus.on_step_end()
        if ends:
            zeus.on_epoch_end()
        return limits_w


# --- Read back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_gpu", "in_force"),
    [({"clamps_to_mw": 450_000}, 450), ({"ignores_limits": True}, 700)],
    ids=["clamped", "ignored"],
)
def test_accepted_but_unapplied_limit_is_an_error(of_gpu: dict[str, Any], in_force: int) -> None:
    device, _ = device_of(**of_gpu)
    with pytest.raises(PowerLimitUnavailableError, match=f"limit of 400 W, and has one of {in_force} W in force"):
        set_and_check(device, 400.0)


def test_limits_below_a_clamp_are_not_measured_under_a_wrong_name(caplog: pytest.LogCaptureFixture) -> None:
    here = Replayed(clamps_to_mw=450_000)
    zeus = here.profiler()
    assert here.train(zeus, 6) == [700, 600, 500, 500, 500, 500]
    assert zeus.profile is not None
    assert zeus.profile.limits_w == (500, 600, 700)
    assert zeus.chosen_limit_w == 500
    assert "has one of 450 W in force: no further limits are tried" in caplog.text
    zeus.close()
    assert here.gpu.limit_mw == 700_000


def test_limit_overruled_by_a_second_limiter_is_not_tried() -> None:
    here = Replayed(enforced_mw=500_000)
    zeus = here.profiler(Time(), limits_w=None)
    assert here.train(zeus, 1) == [500]
    zeus.close()
    assert here.gpu.limit_mw == 700_000


# ---- Changed by others ---------------------------------------------------------------------------------------------


def once_at(limit_w: float, act: Callable[[], object]) -> Callable[[float], None]:
    """Act within the first step under a limit."""
    left = [act]

    def meddle(in_force_w: float) -> None:
        if in_force_w == limit_w and left:
            left.pop()()

    return meddle


def powers_w(zeus: PowerLimitProfiler) -> dict[float, float]:
    """The mean power of each measured limit, in watts."""
    assert zeus.profile is not None
    return {sample.limit_w: sample.energy_j / sample.time_s for sample in zeus.profile.samples}


def test_window_in_which_another_program_set_the_limit_is_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    here = Replayed()
    here.meddle = once_at(300, lambda: setattr(here.gpu, "limit_mw", 500_000))
    zeus = here.profiler()
    assert here.train(zeus, 8) == [700, 600, 500, 400, 300, 300, 200, 500]
    assert powers_w(zeus) == {limit_w: pytest.approx(limit_w) for limit_w in TABLE}
    assert zeus.chosen_limit_w == 500
    (warning,) = warnings_in(caplog)
    assert "another program has changed the power limit of GPU 0 (H200) from 300 W to 500 W" in warning
    zeus.close()
    assert here.gpu.limit_mw == 500_000  # no longer the 700 W of the start


def test_limit_changed_by_another_program_again_and_again_ends_the_search(caplog: pytest.LogCaptureFixture) -> None:
    here = Replayed()
    here.meddle = lambda limit_w: setattr(here.gpu, "limit_mw", 550_000 if limit_w <= 300 else here.gpu.limit_mw)
    zeus = here.profiler()
    assert here.train(zeus, 9) == [700, 600, 500, 400, 300, 300, 300, 550, 550]
    assert (zeus.chosen_limit_w, zeus.is_done) == (None, True)
    changed, given_up = warnings_in(caplog)
    assert given_up.startswith(
        f"no power limit is chosen, and the training continues without a limit of ours: {changed}"
    )
    zeus.close()
    assert here.gpu.limit_mw == 550_000


def test_limit_of_another_program_is_not_exceeded(caplog: pytest.LogCaptureFixture) -> None:
    here = Replayed()
    here.meddle = once_at(500, lambda: setattr(here.gpu, "limit_mw", 350_000))
    zeus = here.profiler()
    assert here.train(zeus, 5) == [700, 600, 500, 350, 350]
    assert zeus.chosen_limit_w is None
    assert warnings_in(caplog)[2].endswith("another program has limited GPU 0 (H200) to 350 W")
    zeus.close()
    assert here.gpu.limit_mw == 350_000


def test_window_in_which_another_limiter_was_active_is_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    here = Replayed(enforced_mw=700_000)
    here.meddle = once_at(500, lambda: setattr(here.gpu, "enforced_mw", 400_000))
    zeus = here.profiler(limits_w=[700, 500])
    here.train(zeus, 2, ends=False)
    here.gpu.enforced_mw = 700_000
    assert here.train(zeus, 2) == [500, 500]
    assert zeus.chosen_limit_w == 500
    assert powers_w(zeus) == pytest.approx({700: 700, 500: 500})
    assert warnings_in(caplog) == ["GPU 0 (H200) obeys a power limit of 400 W instead of 500 W"]
    zeus.close()
    assert here.gpu.limit_mw == 700_000


def test_limit_set_by_an_administrator_after_the_choice_stays(caplog: pytest.LogCaptureFixture) -> None:
    here = Replayed()
    zeus = here.profiler()
    here.train(zeus, 7)
    assert here.gpu.limit_mw == 500_000
    here.gpu.limit_mw = 350_000
    zeus.close()
    assert here.gpu.limit_mw == 350_000
    assert recall("GPU-0") is None
    (warning,) = warnings_in(caplog)
    assert "changed the power limit of GPU 0 (H200) from 500 W to 350 W, which stays in force" in warning


# --- Limits left behind ---------------------------------------------------------------------------------------------


def test_limit_below_the_default_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    here = Replayed(limit_mw=300_000, default_mw=700_000)
    zeus = here.profiler(limits_w=None)
    here.train(zeus, 1)
    (warning,) = warnings_in(caplog)
    assert "has a power limit of 300 W in force, below its default of 700 W" in warning
    assert "`nvidia-smi -i GPU-0 -pl 700` puts the default back" in warning
    zeus.close()


def test_limit_of_a_killed_training_is_not_taken_for_the_initial_limit(caplog: pytest.LogCaptureFixture) -> None:
    here = Replayed(default_mw=700_000)
    killed = here.profiler()
    here.train(killed, 3, ends=False)
    assert here.gpu.limit_mw == 400_000
    restorer = killed._rank.guard._restorer  # killing a container kills everything in it
    assert restorer is not None
    restorer.kill()
    restorer.wait()

    zeus = here.profiler(limits_w=None)
    here.train(zeus, 1)
    assert "GPU 0 (H200) still has the 400 W limit of a killed training; restoring 700 W" in caplog.text
    zeus.close()
    assert here.gpu.limit_mw == 700_000
    assert recall("GPU-0") is None
    killed.close()


@pytest.fixture(name="live")
def start_live_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_live_training_is_named_and_the_limit_left_alone(
    caplog: pytest.LogCaptureFixture, live: subprocess.Popen[bytes]
) -> None:
    here = Replayed(limit_mw=400_000, default_mw=700_000)
    record_limit(live.pid)
    zeus = here.profiler(limits_w=None)
    assert here.train(zeus, 2) == [400] * 2
    assert (zeus.chosen_limit_w, zeus.profile) == (None, None)
    (warning,) = warnings_in(caplog)
    assert f"the training with process id {live.pid} sets its power limit, and restores 700 W when it ends" in warning
    zeus.close()
    assert here.gpu.limit_mw == 400_000


def test_process_with_the_id_of_a_killed_training_is_not_taken_for_it(live: subprocess.Popen[bytes]) -> None:
    device, _ = device_of(limit_mw=400_000, default_mw=650_000)
    record_limit(live.pid, started="1")
    assert LimitGuard([device]).initial_limits_w == (700.0,)


def test_start_of_a_process_is_known_until_it_ends(live: subprocess.Popen[bytes], tmp_path: Path) -> None:
    started = process_start(live.pid)
    assert started == process_start(live.pid) is not None
    assert process_start(1) not in (None, started)
    assert process_start(live.pid, tmp_path) is None  # another system than Linux
    live.kill()
    live.wait()
    assert process_start(live.pid) is None


@pytest.mark.parametrize(("in_force_mw", "restored_mw"), [(500_000, 700_000), (400_000, 700_000), (450_000, 450_000)])
def test_training_killed_in_the_midst_of_a_change_left_either_limit_behind(in_force_mw: int, restored_mw: int) -> None:
    here = Replayed(limit_mw=in_force_mw)
    record_limit(before_w=500.0)
    zeus = here.profiler(wait_steps=100)
    here.train(zeus, 1)
    zeus.close()
    assert here.gpu.limit_mw == restored_mw


def test_limit_changed_since_the_record_is_not_taken_for_left_behind() -> None:
    device, gpu = device_of(limit_mw=350_000)
    remember("GPU-0", 700.0, 400.0)
    assert LimitGuard([device]).initial_limits_w == (350.0,)
    gpu.limit_mw = 400_000
    assert LimitGuard([device]).initial_limits_w == (700.0,)


def test_rank_without_gpus_does_not_change_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    LimitGuard(()).claim()
    assert signal.getsignal(signal.SIGTERM) is before


def test_damaged_records_are_ignored(state_directory: Path) -> None:
    remember("GPU-0", 700.0, 400.0)
    (file,) = (state_directory / "power-limits").iterdir()
    file.write_text('{"original_w": ')
    assert recall("GPU-0") is None
    remember(None, 700.0, 400.0)
    forget("GPU-0")
    forget("GPU-0")
    assert list((state_directory / "power-limits").iterdir()) == []


# --- Descending -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "tried", "chosen_w"),
    [
        (ZeusCost(0.5), [700, 600, 500, 400, 300], 500),  # 770 J and 850 J are clearly above 660 J
        (Time(), [700, 600, 500, 400, 300], 700),
        (Energy(), list(TABLE), 300),  # 510 J; the last limit, 520 J, is hardly above
        (MaxSlowdown(1.1), [700, 600, 500, 400, 300], 500),
    ],
)
def test_lower_limits_are_skipped_after_a_clear_rise_of_the_cost(
    monkeypatch: pytest.MonkeyPatch, selector: Any, tried: list[float], chosen_w: float
) -> None:
    monkeypatch.setattr("zeus_plugins.power_limit.plan.STEP_W", 100.0)
    here = Replayed()
    zeus = here.profiler(selector, limits_w=None)
    limits_w = here.train(zeus, len(TABLE) + 1)
    assert limits_w[: len(tried)] == tried
    assert zeus.chosen_limit_w == chosen_w
    assert set(limits_w[len(tried) :]) == {chosen_w}
    zeus.close()
    again = here.profiler(selector, limits_w=None, profile=zeus.profile)
    assert set(here.train(again, 2)) == {chosen_w}
    again.close()


def test_explicitly_requested_limits_are_all_tried() -> None:
    here = Replayed()
    zeus = here.profiler(Time())
    assert here.train(zeus, len(TABLE)) == list(TABLE)
    zeus.close()
