"""Two processes that agree by gloo on the power limits of their GPUs; each writes down its observations.

Usage: ``python -m tests.support.power_limit_ranks FOLDER`` with torch's variables for a process group of two.
"""

from __future__ import annotations

import json
import logging
import sys
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.power_limit_bench import LIMITS_W, TABLE, Breaks, Forbidden
from tests.support.two_nodes import all_gather
from zeus_plugins.power_limit import Energy, PowerLimitProfile, PowerLimitProfiler, ReplayMachine, ReplayPoint

# The second rank's GPU is slow under low limits: the first rank would choose 150 W, both together choose 200 W.
SLOW = TABLE | {100.0: ReplayPoint(4.0, 80.0), 150.0: ReplayPoint(3.0, 125.0)}
STEPS = 14
SCENES = (
    "all goes well",
    "the second follows",
    "the second may not",
    "the second breaks",
    "the second was capped",
    "other GPUs",
    "known",
    "the second leaves",
)


def play(scene: str, known: PowerLimitProfile | None) -> tuple[dict[str, Any], PowerLimitProfile | None]:
    """Play a scene; return the observations of this rank and its profile."""
    is_second = dist.get_rank() == 1
    where = ReplayMachine(
        SLOW if is_second else TABLE, gpu_model="V100" if scene == "other GPUs" and is_second else "A40"
    )
    devices: Any = where.devices
    monitor: Any = where.monitor
    if is_second:
        match scene:
            case "the second follows":
                devices = monitor = None
            case "the second may not":
                devices = [Forbidden()]
            case "the second breaks":
                devices = [Breaks(where.devices[0], 3)]
            case "the second was capped":
                where.devices[0].set_limit_w(200.0)
    profiler = PowerLimitProfiler(
        devices,
        Energy(),
        warmup_steps=1,
        profile_steps=2,
        monitor=monitor,
        # The default, every 25 W below the found limit, has more limits than the table.
        limits_w=None if scene == "the second was capped" else LIMITS_W,
        profile=known if scene == "known" and not is_second else None,
        all_gather=all_gather,
    )
    log = BufferingHandler(1000)
    log.setLevel(logging.WARNING)
    logging.getLogger("zeus_plugins").addHandler(log)
    limits_w: list[float] = []
    profiler.on_epoch_begin()
    for step in range(STEPS):
        limits_w.append(where.devices[0].limit_w())
        where.train()
        if scene == "the second leaves" and step == 4:
            break
        profiler.on_step_end()
    logging.getLogger("zeus_plugins").removeHandler(log)
    if scene != "the second leaves" or is_second:
        profiler.close()
    told = {
        "limits_w": limits_w,
        "chosen_limit_w": profiler.chosen_limit_w,
        "profile": None if profiler.profile is None else profiler.profile.model_dump(mode="json"),
        "limit_w_after": where.devices[0].limit_w(),
        "warnings": [record.getMessage() for record in log.buffer],
    }
    profiler.close()
    return told, profiler.profile


if __name__ == "__main__":
    dist.init_process_group("gloo")
    stories: dict[str, Any] = {}
    measured: PowerLimitProfile | None = None
    for each in SCENES:
        stories[each], profile = play(each, measured)
        measured = profile if each == "all goes well" else measured
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(stories))
    dist.destroy_process_group()
