"""One process of a Lightning training on two nodes, as a cluster's launcher starts it.

Usage: ``python -m tests.support.lightning_nodes SERVER_URL JOB_ID FOLDER``,
with Lightning's variables in the environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch.loggers import CSVLogger

from tests.support.ddp_training import ScoreByRank, job_named
from tests.support.lightning_bench import StepMonitor
from tests.support.lightning_models import HardCodedData, quiet_trainer
from zeus_plugins.lightning import ZeusBSOCallback, ZeusEnergyCallback

NEVER = 2.0


def main(server_url: str, job_id: str, folder: str) -> None:
    """Train two epochs, in which each node uses 10 J in each of its steps."""
    torch.set_num_threads(1)
    module = ScoreByRank()
    monitors = [StepMonitor(), StepMonitor()]
    for monitor in monitors:
        monitor.watch(module)
    callback = ZeusBSOCallback(
        job_named(job_id, NEVER), "score", server_url=server_url, energy_monitor=monitors[0], on_failure="stop"
    )
    meter = ZeusEnergyCallback(monitors[1])
    logger = CSVLogger(folder, name=None, version="")
    trainer = quiet_trainer(
        callback,
        meter,
        max_epochs=2,
        devices=1,
        num_nodes=2,
        strategy="ddp",
        logger=logger,
        log_every_n_steps=1,
    )
    trainer.fit(module, HardCodedData())
    told = {
        "steps": trainer.global_step,
        "metered_j": meter.energy_j,
        "open": [len(each._windows) for each in monitors],
    }
    Path(folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
