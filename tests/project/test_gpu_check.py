"""`benchmarks.gpu_check` on a simulated GPU, and each of its verdicts."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_check import (
    Bursts,
    Examination,
    Load,
    Result,
    Span,
    Verdict,
    agreement_result,
    ask_mapping,
    main,
)
from tests.support.fake_nvml import FakeGpu, FakeNvml

# --- A GPU with a counter that moves every 100 ms and a power reading averaged over a second, on a simulated clock ----


IDLE_W, BUSY_W = 80.0, 600.0
BURST_S = 0.2
MULTIPLICATION_S = 0.002
_GRAIN_S = 0.002


class SimulatedGpu(FakeNvml):
    """The GPU with its driver, its clock and its load.

    Attributes:
        misreads: Factor of the error of power readings.
        period_s: Seconds between updates of the counter.
        samples: The share of each period whose power the counter takes for that of the whole period.
    """

    def __init__(self, misreads: float = 1.0, period_s: float = 0.1, samples: float = 1.0, **of_gpu: Any) -> None:
        gpu = FakeGpu(uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", power_mw=0, default_mw=700_000, **of_gpu)
        gpu.enforced_mw = 700_000
        super().__init__([gpu])
        self.gpu = gpu
        self.misreads = misreads
        self.period_s = period_s
        self.now_s = 100.0
        self.phase: str | Bursts = "idle"
        self.samples = samples
        self.busy_s = 0.0
        self._energy_mj = 7_000_000.0
        self._latest_w = deque([IDLE_W] * round(1 / _GRAIN_S), maxlen=round(1 / _GRAIN_S))
        self._tell()

    def clock(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        for _ in range(max(1, round(time_s / _GRAIN_S))):
            power_w = self._power_w()
            before = int(self.now_s / self.period_s + 1e-9)
            self.busy_s += _GRAIN_S * (power_w == BUSY_W)
            if (self.now_s + _GRAIN_S / 2) % self.period_s < self.samples * self.period_s:
                self._energy_mj += 1000 * power_w * _GRAIN_S / self.samples
            self.now_s += _GRAIN_S
            self._latest_w.append(power_w)
            if int(self.now_s / self.period_s + 1e-9) > before and self.gpu.counter_mj is not None:
                self.gpu.counter_mj = round(self._energy_mj)
        self._tell()

    def _power_w(self) -> float:
        if isinstance(self.phase, Bursts):
            return IDLE_W if self.phase.rest_s(self.now_s + 1e-6) else BUSY_W
        is_busy = self.phase == "load" or (self.phase == "bursts" and self.now_s % (2 * BURST_S) < BURST_S)
        return BUSY_W if is_busy else IDLE_W

    def _tell(self) -> None:
        noise_mw = 300 * (int(self.now_s / 0.1) % 2)  # noise of a sensor
        self.gpu.power_mw = round(1000 * self.misreads * sum(self._latest_w) / len(self._latest_w)) + noise_mw

    def nvmlDeviceGetFieldValues(  # noqa: N802 - NVML's own name
        self, handle: FakeGpu, fields: Sequence[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        handle.instant_mw = round(1000 * self.misreads * self._power_w())
        return super().nvmlDeviceGetFieldValues(handle, fields)


class SimulatedLoad(Load):
    """Load of a `SimulatedGpu`."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    @contextmanager
    def running(self, phase: str | Bursts) -> Iterator[None]:
        self._gpu.phase = phase
        yield
        self._gpu.phase = "idle"

    @property
    def multiplications(self) -> int:  # type: ignore[override]  # counted by the simulated clock
        return round(self._gpu.busy_s / MULTIPLICATION_S)

    def queued(self) -> tuple[float, float]:
        return 0.01, 0.4


CHECKS = [
    *("other processes", "period of the counter", "period of the power reading"),
    *("energy, idle", "energy, load", "energy, bursts", "energy, phases", "queued work"),
    "power limits",
    *("mapping by index", "mapping by index, bus order", "mapping by UUID"),
    "mapping by short UUID",
]


def agreeing(variables: Mapping[str, str]) -> Mapping[str, Any]:
    del variables
    uuid = "8932f937-d72c-4106-c12f-20bd9faed9f6"
    return {"cuda": [uuid], "ours": [f"GPU-{uuid}"], "problem": None}


def examination(gpu: SimulatedGpu, ask: Any = agreeing) -> Examination:
    return Examination(gpu, load=lambda _: SimulatedLoad(gpu), ask=ask, clock=gpu.clock, sleep=gpu.sleep)


def examined(gpu: SimulatedGpu, **options: Any) -> dict[str, Result]:
    return {each.check: each for each in examination(gpu, **options).results()}


def test_healthy_gpu_passes_every_check_and_keeps_the_settings() -> None:
    gpu = SimulatedGpu()
    results = examined(gpu)
    assert list(results) == CHECKS
    assert {each.check: each.verdict for each in results.values()} == dict.fromkeys(CHECKS, Verdict.OK)
    assert results["period of the counter"].details["median_s"] == pytest.approx(0.1, abs=0.005)
    assert "600 W by the counter, mean power" in results["energy, load"].found
    assert results["queued work"].details["missed"] == pytest.approx(0.975)
    assert results["mapping by UUID"].found == "both: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    assert gpu.gpu.limit_mw == 700_000


@pytest.mark.parametrize(
    ("gpu", "check", "found"),
    [
        (SimulatedGpu(misreads=0.5), "energy, load", "mean power -50"),
        (SimulatedGpu(period_s=0.5), "period of the counter", "every 500 ms in the median"),
        (SimulatedGpu(period_s=5.0), "period of the counter", "has not moved twice in 3 s"),
        (SimulatedGpu(pids=[1]), "other processes", "1 beside this one"),
        (SimulatedGpu(limit_mw=300_000), "power limits", "300 W of 200 W to 700 W, default 700 W"),
        (SimulatedGpu(max_power_mw=None), "power limits", "Not Supported"),
    ],
    ids=["power of half", "a slow counter", "a counter that stands still", "company", "a low limit", "no limits"],
)
def test_doubtful_results_are_marked_as_doubtful(gpu: SimulatedGpu, check: str, found: str) -> None:
    result = examined(gpu)[check]
    assert result.verdict is Verdict.DOUBTFUL
    assert found in result.found


def test_gpu_without_a_counter_is_reported_and_the_remaining_checks_run() -> None:
    gpu = SimulatedGpu()
    gpu.gpu.counter_mj = None
    results = examined(gpu)
    assert results["readings"].found == "GPU 0 (NVIDIA H200) gives no energy counter: Not Supported"
    assert results["mapping by UUID"].verdict is Verdict.OK


def test_counter_that_samples_a_quarter_of_the_time_is_doubtful_by_phases_only() -> None:
    results = examined(SimulatedGpu(samples=0.25))
    doubtful = [check for check, each in results.items() if each.verdict is Verdict.DOUBTFUL]
    assert doubtful == ["energy, phases"]
    joules = [each["joules"] for each in results["energy, phases"].details["bursts_j"]]
    assert joules[0] == pytest.approx(4 * results["energy, phases"].details["run_j"], rel=0.2)
    assert max(joules[1:4]) < 0.2 * results["energy, phases"].details["run_j"]
    assert joules[4:] == pytest.approx([results["energy, phases"].details["run_j"]] * 2, rel=0.3)


# ---- Single results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter_j", "mean_j", "instant_j", "verdict"),
    [
        (100.0, 95.0, 105.0, "ok"),
        (100.0, 85.0, 100.0, "doubtful"),
        (100.0, None, 100.0, "ok"),
        (100.0, 100.0, 111.0, "doubtful"),
        (100.0, None, None, "skipped"),
        (0.0, 0.0, 0.0, "doubtful"),
    ],
)
def test_power_readings_under_load_are_within_a_tenth(
    counter_j: float, mean_j: float | None, instant_j: float | None, verdict: str
) -> None:
    assert agreement_result("GPU 0", "load", Span(4.0, counter_j, mean_j, instant_j)).verdict == verdict


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ({"cuda": ["a", "b"], "ours": ["GPU-a", "GPU-b"], "problem": None}, "ok"),
        ({"cuda": ["b"], "ours": ["GPU-a"], "problem": None}, "doubtful"),
        ({"cuda": [], "ours": [], "problem": None}, "doubtful"),
        ({"cuda": None, "ours": ["GPU-a"], "problem": "PyTorch cannot start CUDA: no driver"}, "skipped"),
    ],
)
def test_gpus_are_mapped_as_cuda_maps_them(told: Mapping[str, Any], verdict: str) -> None:
    asked: list[Mapping[str, str]] = []

    def ask(variables: Mapping[str, str]) -> Mapping[str, Any]:
        asked.append(variables)
        return told

    results = examined(SimulatedGpu(), ask=ask)
    assert {each.verdict for check, each in results.items() if check.startswith("mapping")} == {verdict}
    assert asked == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"},
    ]


def test_mapping_is_asked_in_a_separate_process_which_states_failures() -> None:
    told = ask_mapping({"CUDA_VISIBLE_DEVICES": ""})
    assert told["cuda"] is None
    assert told["problem"]


# --- Command --------------------------------------------------------------------------------------------------------


def test_command_prints_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"], examination(SimulatedGpu())) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["check"] for each in told["results"]] == CHECKS
    assert told["doubtful"] == 0
