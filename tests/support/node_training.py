"""A process of a training on two nodes, as started by a cluster's launcher.

Usage: ``python -m tests.support.node_training BENCH SERVER_URL JOB_ID FOLDER``, with the launcher's variables in the
environment; ``BENCH`` is the module of a framework's bench.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.support.frameworks import Work
from tests.support.job_bench import NEVER, CountingMonitor
from tests.support.process_end import leave

OPTIONS: dict[str, dict[str, Any]] = {
    "lightning_bench": {"num_nodes": 2, "strategy": "ddp"},
    "hf_bench": {"ddp_backend": "gloo"},
}


def main(name: str, server_url: str, job_id: str, folder: str) -> None:
    """Train two epochs with 10 J per step and node."""
    torch.set_num_threads(1)
    work = Work()
    monitors = [CountingMonitor(lambda: work.batches) for _ in range(2)]
    bench = import_module(f"tests.support.{name}").Bench(
        argparse.Namespace(url=server_url), job_id, Path(folder, "checkpoints")
    )
    job = bench.job(NEVER, batch_sizes=(48,), max_epochs=2)
    meter = bench.Energy(monitors[1])
    zeus = bench.callback(job, energy_monitor=monitors[0], on_failure="stop")
    training = bench.training(zeus, meter, work=work, epochs=2, **OPTIONS[name])
    training.train()
    told = {
        "steps": training.steps[0],
        "metered_j": meter.energy_j,
        "open": [len(each.open_windows) for each in monitors],
    }
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
