"""A training on two processes, started as a user starts a script; every rank writes down what happened to it.

Usage: ``python -m tests.ddp_training SERVER_URL JOB_ID TARGET FOLDER``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.lightning_models import Classifier, HardCodedData, quiet_trainer
from zeus_plugins import JobSpec
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.lightning import ZeusBSOCallback

BATCH_SIZE = 48
WORLD_SIZE = 2
SCORES = (0.25, 0.75)


class ScoreByRank(Classifier):
    """Logs another score on each rank, as a metric does that nobody synchronises."""

    def validation_step(self, batch: list[torch.Tensor]) -> None:  # noqa: ARG002 - Lightning's signature
        self.log("score", SCORES[self.global_rank])


def train(server_url: str, job_id: str, target: float) -> dict[str, Any]:
    """Train two epochs at most.

    Returns:
        What this rank saw.
    """
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(BATCH_SIZE,),
        default_batch_size=BATCH_SIZE,
        target_metric=target,
        max_epochs=2,
    )
    callback = ZeusBSOCallback(job, "score", server_url=server_url)
    module = ScoreByRank()
    trainer = quiet_trainer(callback, max_epochs=2, devices=WORLD_SIZE, strategy="ddp")
    seen: dict[str, Any] = {}
    try:
        # Nothing but the saved arguments of this loader's constructor says its size when Lightning makes it anew.
        trainer.fit(module, HardCodedData())
    except ZeusBSOError as error:
        seen |= {"error": type(error).__name__, "message": str(error)}
    else:
        assert callback.trial.verdict is not None
        seen |= {"converged": callback.trial.verdict.converged, "trial_number": callback.trial.trial_number}
    return seen | {
        "rank": trainer.global_rank,
        "sizes": module.seen_sizes,
        "steps": trainer.global_step,
        "estimated_steps": module.estimated_steps,
    }


def main(server_url: str, job_id: str, target: str, folder: str) -> None:
    """Train, and write what was seen to a file per rank."""
    torch.set_num_threads(1)
    seen = train(server_url, job_id, float(target))
    Path(folder, f"rank{seen['rank']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
