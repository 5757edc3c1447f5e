"""A training on two processes, started as a user starts a script; every rank writes down what happened to it.

Usage: ``python -m tests.support.ddp_training SERVER_URL JOB_ID TARGET FOLDER SCENARIO``.
Scenarios: ``plain``; ``guessed``, where a target and a metric are all that is said; ``memory``, in which the memory of
the second rank runs out; ``preempted``, in which all ranks are, and then go on from a checkpoint; ``spawn``, in which
Lightning makes the processes itself.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.lightning_models import Classifier, HardCodedData, quiet_trainer
from zeus_plugins import JobSpec
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.training.entry import OnUnreachable

BATCH_SIZE = 48
WORLD_SIZE = 2
SCORES = (0.25, 0.75)


class ScoreByRank(Classifier):
    """Logs another score on each rank, as a metric does that nobody synchronises."""

    def validation_step(self, batch: list[torch.Tensor]) -> None:  # noqa: ARG002 - Lightning's signature
        self.log("score", SCORES[self.global_rank])


def job_named(job_id: str, target: float) -> JobSpec:
    return JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(BATCH_SIZE,),
        default_batch_size=BATCH_SIZE,
        target_metric=target,
        max_epochs=2,
    )


class OutOfMemory(Callback):
    """Fails one rank."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")


class Preemption(Callback):
    """Interrupts all ranks in the second epoch."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.current_epoch == 1:
            raise SystemExit(143)


class WriteDown(Callback):
    """Leaves what a spawned process saw, which ends with all it knows."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seen = {"sizes": pl_module.seen_sizes, "steps": trainer.global_step}
        Path(self._folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


def spawn(server_url: str, job_id: str, target: float, folder: str) -> None:
    callback = ZeusBSOCallback(job_named(job_id, target), "score", server_url=server_url)
    trainer = quiet_trainer(callback, WriteDown(folder), max_epochs=2, devices=WORLD_SIZE, strategy="ddp_spawn")
    trainer.fit(ScoreByRank(), HardCodedData())
    try:
        trial = str(callback.trial)
    except ZeusBSOError as error:
        trial = str(error)
    Path(folder, "parent.json").write_text(json.dumps(trial))


def train(server_url: str, job_id: str, target: float, folder: str, scenario: str) -> dict[str, Any]:
    """Train two epochs at most.

    Returns:
        What this rank saw.
    """
    job = job_named(job_id, target)
    on_unreachable: OnUnreachable = "raise" if scenario == "raise" else "default"
    callback = (
        ZeusBSOCallback(monitor="score", target=target, job_id=job_id, server_url=server_url)
        if scenario == "guessed"
        else ZeusBSOCallback(job, "score", server_url=server_url, on_unreachable=on_unreachable)
    )
    module = ScoreByRank()
    others: list[Callback] = [OutOfMemory()] if scenario == "memory" else []
    options = {"max_epochs": 2, "devices": WORLD_SIZE, "strategy": "ddp"}
    resume = {}
    if scenario == "preempted":
        saver = ModelCheckpoint(folder, save_last=True)
        interrupted = quiet_trainer(callback, Preemption(), saver, **options, enable_checkpointing=True)
        with suppress(SystemExit):
            interrupted.fit(module, HardCodedData())
        # Only the first rank may talk to the server: the others are given an address where there is none.
        url = server_url if interrupted.is_global_zero else "http://127.0.0.1:9"
        callback = ZeusBSOCallback(job, "score", server_url=url)
        resume = {"ckpt_path": Path(folder, "last.ckpt")}
    trainer = quiet_trainer(callback, *others, **options)
    seen: dict[str, Any] = {}
    try:
        # Nothing but the saved arguments of this loader's constructor says its size when Lightning makes it anew.
        trainer.fit(module, HardCodedData(), **resume)
    except ZeusBSOError as error:
        seen |= {"error": type(error).__name__, "message": str(error)}
    else:
        assert callback.trial.verdict is not None
        seen |= {"converged": callback.trial.verdict.converged, "trial_number": callback.trial.trial_number}
        seen["score"] = float(trainer.callback_metrics["score"])
    return seen | {
        "rank": trainer.global_rank,
        "sizes": module.seen_sizes,
        "steps": trainer.global_step,
        "estimated_steps": module.estimated_steps,
    }


def main(server_url: str, job_id: str, target: str, folder: str, scenario: str) -> None:
    """Train, and write what was seen to a file per rank."""
    torch.set_num_threads(1)
    if scenario == "spawn":
        spawn(server_url, job_id, float(target), folder)
        return
    seen = train(server_url, job_id, float(target), folder, scenario)
    Path(folder, f"rank{seen['rank']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
