"""On GPUs replayed from Zeus's traces (NSDI '23), the profiler chooses the cheapest limits of the traces.

The traces are not part of this repository: ``ZEUS_TRACES`` names the folder that holds ``summary_power_v100.csv``.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest

from tests.support.power_limit_bench import ANY_LENGTH, ReplayMachine, ReplayPoint
from zeus_plugins.power_limit import PowerLimitProfile, PowerLimitProfiler, PowerLimitSample, ZeusCost
from zeus_plugins.protocol import GpuConfig

pytestmark = pytest.mark.traces

WORKLOADS = (
    ("cifar100", "shufflenetv2", "adadelta"),
    ("imagenet", "resnet50", "adadelta"),
    ("squad", "bert_base_uncased", "adamw"),
    ("librispeech", "deepspeech2", "adamw"),
    ("movielens-1m", "ncf", "adam"),
    ("sentiment140", "bert_base_uncased", "adamw"),
)
EVERYWHERE = pytest.mark.parametrize(
    ("workload", "eta", "gpu"), list(product(WORKLOADS, (0.0, 0.5, 1.0), ("v100", "a40")))
)
STEPS = 1000  # of an epoch; the real number is not recorded and irrelevant
Tables = dict[int, dict[float, tuple[float, float]]]


def tables(workload: tuple[str, str, str], gpu: str) -> Tables:
    """Return, by batch size and power limit in watts, the seconds of an epoch and the average power in watts."""
    folder = os.environ.get("ZEUS_TRACES")
    if not folder:
        pytest.skip("Zeus's traces are not here: set ZEUS_TRACES to the folder of summary_power_v100.csv")
    found: Tables = defaultdict(dict)
    with Path(folder, f"summary_power_{gpu}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["dataset"], row["network"], row["optimizer"]) == workload:
                pair = float(row["time_per_epoch"]), float(row["average_power"])
                found[int(row["batch_size"])][float(row["power_limit"])] = pair
    assert found, f"the traces have no {workload}"
    return found


@EVERYWHERE
def test_cheapest_limit_of_the_trace_is_chosen(workload: tuple[str, str, str], eta: float, gpu: str) -> None:
    for batch_size, epochs in tables(workload, gpu).items():
        max_power_w = max(epochs)
        # Taken from the trace: the energy of an epoch is its average power × its duration.
        costs = {
            limit_w: eta * power_w * time_s + (1 - eta) * max_power_w * time_s
            for limit_w, (time_s, power_w) in epochs.items()
        }
        where = ReplayMachine(
            {limit_w: ReplayPoint(time_s / STEPS, power_w) for limit_w, (time_s, power_w) in epochs.items()}
        )
        limits_w = sorted(epochs, reverse=True)
        options = {"monitor": where.monitor, "limits_w": limits_w, **ANY_LENGTH}
        profiler = PowerLimitProfiler(where.devices, ZeusCost(eta), **options)
        profiler.on_epoch_begin(STEPS)
        for _ in range(STEPS):
            where.train()
            profiler.on_step_end()
        assert profiler.profile is not None
        assert profiler.profile.limits_w == tuple(sorted(epochs)), batch_size
        assert profiler.chosen_limit_w == min(sorted(costs), key=costs.__getitem__), batch_size
        assert where.devices[0].limit_w() == profiler.chosen_limit_w
        profiler.close()
        assert where.devices[0].limit_w() == max_power_w


@EVERYWHERE
def test_skipped_limits_are_never_the_cheapest(workload: tuple[str, str, str], eta: float, gpu: str) -> None:
    selector = ZeusCost(eta)
    for batch_size, epochs in tables(workload, gpu).items():
        gpus = GpuConfig(max_power=max(epochs), number_of_gpus=1, gpu_model=gpu)
        samples = {
            limit_w: PowerLimitSample(limit_w=limit_w, steps=1, time_s=time_s, energy_j=power_w * time_s)
            for limit_w, (time_s, power_w) in epochs.items()
        }
        whole = PowerLimitProfile(gpus=gpus, samples=tuple(samples[limit_w] for limit_w in sorted(samples)))
        tried = PowerLimitProfile(gpus=gpus)
        for limit_w in sorted(samples, reverse=True):
            tried = tried.with_sample(samples[limit_w])
            if selector.has_risen(tried):
                break
        assert selector.select(tried) == selector.select(whole), batch_size
