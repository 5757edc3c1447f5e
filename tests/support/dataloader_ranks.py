"""One rank of a `ZeusDataLoader`'s training under a launcher that sets neither LOCAL_RANK nor LOCAL_WORLD_SIZE.

Usage: ``python -m tests.support.dataloader_ranks FOLDER`` with torch's variables for a process group of two.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.support.power_limit_bench import ReplayMachine, ReplayPoint
from zeus_plugins.dataloader import ZeusDataLoader
from zeus_plugins.errors import ZeusBSOConfigError

STEPS = 20
TABLE = {150.0: ReplayPoint(1.2, 150.0), 175.0: ReplayPoint(1.05, 150.0), 200.0: ReplayPoint(1.0, 200.0)}


def refuse(text: str, **options: Any) -> None:
    with pytest.raises(ZeusBSOConfigError, match=text):
        ZeusDataLoader(TensorDataset(torch.arange(16.0)), max_epochs=3, distributed="dp", **options)


def main(folder: str) -> None:
    """Train to the target, in the second epoch; write down the limits of this rank's device and the measurements."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    machine = ReplayMachine(TABLE)
    data = TensorDataset(torch.arange(2.0 * STEPS))
    refuse("without it, every rank trains on all data", batch_size=8)
    refuse("cannot be spread evenly over 2 ranks", batch_size=7, sampler=DistributedSampler(data))
    refuse("is for rank 0 of 3", batch_size=8, sampler=DistributedSampler(data, 3, 0))
    loader: ZeusDataLoader[Any] = ZeusDataLoader(
        data,
        batch_size=2,
        max_epochs=5,
        distributed="dp",
        sampler=DistributedSampler(data),
        monitor=machine.monitor,
        devices=machine.devices,
        environ={"ZEUS_TARGET_METRIC": "1", "ZEUS_LOG_DIR": folder, "ZEUS_PROFILE_PARAMS": "0,1"},
    )
    limits_w = set()
    seen: list[list[float]] = []
    for epoch in loader.epochs():
        seen.append([])
        for (batch,) in loader:
            seen[-1] += batch.tolist()
            machine.train()
            limits_w.add(machine.devices[0].limit_w())
        loader.report_metric(1.0 if rank == 0 and epoch == 1 else 0.0)  # only rank 0's metric counts
    assert [len(samples) for samples in seen] == [STEPS] * 2
    assert seen[0] != seen[1], "set_epoch was not called"
    training = loader._training
    profile = None if training is None or training._profiler is None else training._profiler.profile
    told = {
        "limits_w": sorted(limits_w),
        "energy_j": {} if profile is None else {each.limit_w: each.energy_per_step_j for each in profile.samples},
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
