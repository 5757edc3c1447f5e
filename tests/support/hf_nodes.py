"""One process of a Hugging Face training on two nodes, as a cluster's launcher starts it.

Usage: ``python -m tests.support.hf_nodes SERVER_URL JOB_ID FOLDER``, with torchrun's variables in the environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.hf_models import Classifier, Scores, quiet_trainer
from tests.support.job_bench import CountingMonitor
from tests.support.process_end import leave
from zeus_plugins import JobSpec
from zeus_plugins.huggingface import ZeusBSOTrainerCallback, ZeusEnergyTrainerCallback

BATCH_SIZE = 48
NEVER = 2.0


def main(server_url: str, job_id: str, folder: str) -> None:
    """Train two epochs, in which each node uses 10 J in each of its steps."""
    torch.set_num_threads(1)
    model = Classifier()
    monitors = [CountingMonitor(lambda: len(model.seen_sizes)) for _ in range(2)]
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(BATCH_SIZE,),
        default_batch_size=BATCH_SIZE,
        target_metric=NEVER,
        max_epochs=2,
    )
    callback = ZeusBSOTrainerCallback(
        job, "score", server_url=server_url, energy_monitor=monitors[0], on_failure="stop"
    )
    meter = ZeusEnergyTrainerCallback(monitors[1])
    data: dict[str, Any] = {"model": model, "compute_metrics": Scores(0.5)}
    trainer = quiet_trainer(
        Path(folder, "checkpoints"),
        callback,
        meter,
        trainer_options=data,
        num_train_epochs=2,
        eval_strategy="epoch",
        ddp_backend="gloo",
    )
    trainer.train()
    told = {
        "steps": trainer.state.global_step,
        "metered_j": meter.energy_j,
        "open": [len(each.open_windows) for each in monitors],
    }
    Path(folder, f"rank{trainer.args.process_index}.json").write_text(json.dumps(told))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
