"""Energy of a real NVIDIA GPU, which has both a counter and a power reading."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.fake_nvml import has_nvidia_driver
from zeus_plugins.energy import NvmlMonitor, NvmlPowerMonitor, auto

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_nvidia_driver(), reason="needs an NVIDIA GPU"),
]

# Long enough that the second over which newer GPUs average power has little influence.
WORK = """
import sys, time
import torch

if torch.cuda.is_available():
    matrix = torch.rand(4096, 4096, device="cuda")
    end_s = time.monotonic() + 8
    while time.monotonic() < end_s:
        matrix @ matrix
        torch.cuda.synchronize()
else:
    time.sleep(8)
"""


def work() -> None:
    """Keep the first GPU busy if PyTorch can, and leave it idle otherwise."""
    subprocess.run([sys.executable, "-c", WORK], check=True)


def test_real_gpu_uses_energy_between_two_windows() -> None:
    monitor = NvmlMonitor([0])
    monitor.begin_window("whole")
    parts_j: list[float] = []
    while not any(parts_j) and len(parts_j) < 100_000:  # the counter moves every few tens of milliseconds
        monitor.begin_window("part")
        parts_j.append(monitor.end_window("part").energy_j)

    assert monitor.end_window("whole").energy_j >= parts_j[-1] > 0
    assert monitor.gpus().max_power > 0


def test_counter_is_chosen_on_a_real_gpu() -> None:
    assert auto().source == "nvml"


def test_both_monitors_describe_the_same_gpus() -> None:
    assert NvmlMonitor().gpus() == NvmlPowerMonitor().gpus()


def test_counter_and_integrated_power_agree() -> None:
    monitors = (NvmlMonitor(), NvmlPowerMonitor())
    for monitor in monitors:
        monitor.begin_window("work")
    work()
    counted, integrated = (monitor.end_window("work") for monitor in monitors)
    assert "estimate" not in counted.source
    assert integrated.energy_j == pytest.approx(counted.energy_j, rel=0.2)
