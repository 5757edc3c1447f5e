"""Jobs made of MLPerf's published reference convergence points.

The file holds facts: for each benchmark its global batch sizes, and the evaluations to the target that each training
took, hyper-parameters being tuned for each size. It says nothing on time or power, which follow a law here:

- Time per epoch, of which an evaluation ends each, is ``t₀ · (1 + b₀ / b)``: throughput saturates at b₀.
- Power is 35 % of the largest, and 65 % of it times the utilisation ``b / (b + b₀)``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from bso_server.simulate.workload import Epoch, SizeTrace, Workload

# b₀ over the geometric mean of the sizes: throughput saturates below the sizes, among them, or above.
_SATURATIONS = (1 / 8, 1.0, 8.0)
_IDLE_SHARE = 0.35
_MAX_POWER_W = 400.0
# t₀; neither it nor the largest power changes a ratio of costs.
_EPOCH_S = 600.0


def mlperf_workloads(file: Path) -> list[Workload]:
    """All jobs of a file: each benchmark with three values of b₀, and two defaults.

    The defaults are the second-smallest and the second-largest size. `max_epochs` is three times the mean of the
    default's epochs to the target, rounded up.

    Args:
        file: JSON, ``{"jobs": {NAME: {"sizes": [b, …], "reports_to_target": [[evaluations of each run, …], …]}}}`` with
            ascending sizes, and a list of runs for each.

    Raises:
        ValueError: The file is no such JSON, or a job has a single size.
    """
    try:
        jobs = json.loads(file.read_text("utf-8"))["jobs"]
        return [
            _workload(name, job["sizes"], job["reports_to_target"], saturation, place)
            for name, job in jobs.items()
            for saturation in _SATURATIONS
            for place in (1, -2)
        ]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not hold jobs with sizes and reports_to_target: {error!r}") from error


def _workload(
    name: str, sizes: Sequence[int], runs: Sequence[Sequence[float]], saturation: float, place: int
) -> Workload:
    saturates_at = saturation * math.exp(sum(map(math.log, sizes)) / len(sizes))
    return Workload(
        name=f"{name}, b₀ {saturation:g}, default {sizes[place]}",
        sizes=tuple(
            SizeTrace(size, tuple(map(float, epochs)), {_MAX_POWER_W: _epoch(size, saturates_at)})
            for size, epochs in zip(sizes, runs, strict=True)
        ),
        default_batch_size=sizes[place],
        max_epochs=math.ceil(3 * sum(runs[place]) / len(runs[place])),
        max_power_w=_MAX_POWER_W,
    )


def _epoch(size: int, saturates_at: float) -> Epoch:
    time_s = _EPOCH_S * (1 + saturates_at / size)
    utilisation = size / (size + saturates_at)
    return Epoch(time_s, time_s * _MAX_POWER_W * (_IDLE_SHARE + (1 - _IDLE_SHARE) * utilisation))
