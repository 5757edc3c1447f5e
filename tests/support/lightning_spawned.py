"""A training on two processes spawned by Lightning; each process and the parent write down their observations.

Usage: ``python -m tests.support.lightning_spawned SERVER_URL JOB_ID FOLDER``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.support.lightning_bench import Bench, Classifier, HardCodedData, quiet_trainer
from zeus_plugins.errors import ZeusBSOError


class WriteDown(Callback):
    """Write the observations of a spawned process to a file, because its memory is lost."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seen = {"sizes": pl_module.seen_sizes, "steps": trainer.global_step}
        Path(self._folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


def main(server_url: str, job_id: str, folder: str) -> None:
    torch.set_num_threads(1)
    bench = Bench(argparse.Namespace(url=server_url), job_id, Path(folder))
    callback = bench.BatchSize(bench.job(0.5, max_epochs=2), "score", server_url=server_url)
    trainer = quiet_trainer(callback, WriteDown(folder), max_epochs=2, devices=2, strategy="ddp_spawn")
    trainer.fit(Classifier(0.5), HardCodedData())
    try:
        trial = str(callback.trial)
    except ZeusBSOError as error:
        trial = str(error)
    Path(folder, "parent.json").write_text(json.dumps(trial))


if __name__ == "__main__":
    main(*sys.argv[1:])
