"""A training of the Hugging Face Trainer on two processes; each writes down what happened to it.

Usage: ``torchrun --nproc_per_node 2 -m tests.support.hf_distributed_training SERVER_URL JOB_ID FOLDER WAY…``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.hf_models import Classifier, HardCodedTrainer, PreparedTrainer, Scores, Stream, quiet_trainer
from tests.support.process_end import leave
from zeus_plugins import JobSpec
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.huggingface import ZeusBSOTrainerCallback, ZeusEnergyTrainerCallback
from zeus_plugins.training.entry import OnUnreachable

BATCH_SIZE = 48
WORLD_SIZE = 2
NOWHERE = "http://127.0.0.1:9"  # the port of a service that nobody runs any more
NEVER = 2.0
AT_ONCE = 0.0

# How the script gives data and arguments; all train one epoch at most.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unreachable": {},
    "without server": {},
    "never": {},
    "memory": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "prepared": {"kind": PreparedTrainer},
    "raw": {"kind": HardCodedTrainer},
    "split": {"accelerator_config": {"split_batches": True}},
    "split prepared": {"kind": PreparedTrainer, "accelerator_config": {"split_batches": True}},
    "dispatch": {"accelerator_config": {"dispatch_batches": True}},
    "split dispatch": {"accelerator_config": {"dispatch_batches": True, "split_batches": True}},
    "stream": {"trainer_options": {"train_dataset": Stream()}, "max_steps": 3},
    "stream in shares": {
        "trainer_options": {"train_dataset": Stream()},
        "max_steps": 3,
        "accelerator_config": {"dispatch_batches": False},
    },
    "stream split": {
        "trainer_options": {"train_dataset": Stream()},
        "max_steps": 3,
        "accelerator_config": {"dispatch_batches": False, "split_batches": True},
    },
}


def batch_size_of(way: str) -> int:
    """Accelerate splits even batches only, so an odd share shows that the trainer's batch is that of all processes."""
    return 42 if "split" in way else BATCH_SIZE


class FailsOnRankOne(Classifier):
    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if torch.distributed.get_rank() == 1 and len(self.seen_sizes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(pixels, labels)


def train(server_url: str, job_id: str, folder: Path, way: str) -> dict[str, Any]:
    """Train.

    Returns:
        What this process saw.
    """
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(batch_size_of(way),),
        default_batch_size=batch_size_of(way),
        target_metric=NEVER if way == "never" else AT_ONCE,
        max_epochs=1,
    )
    url = NOWHERE if way in ("unreachable", "without server") else server_url
    on_unreachable: OnUnreachable = "raise" if way == "unreachable" else "default"
    callback = ZeusBSOTrainerCallback(job, "score", server_url=url, on_unreachable=on_unreachable)
    meter = ZeusEnergyTrainerCallback()
    options = dict(WAYS[way])
    data = {
        "model": FailsOnRankOne() if way == "memory" else Classifier(),
        "compute_metrics": Scores(0.5),
        **options.pop("trainer_options", {}),
    }
    trainer = quiet_trainer(
        folder / "checkpoints", callback, meter, trainer_options=data, ddp_backend="gloo", **options
    )
    seen: dict[str, Any] = {"rank": trainer.args.process_index}
    try:
        trainer.train()
    except (ZeusBSOError, RuntimeError) as error:
        seen |= {"error": type(error).__name__, "message": str(error)}
    else:
        assert callback.trial.verdict is not None
        seen |= {"converged": callback.trial.verdict.converged, "trial_number": callback.trial.trial_number}
    rows = [row for row in trainer.state.log_history if "zeus/time_s" in row]
    seen |= {"time_s": meter.time_s, "energy_rows": len(rows)}
    model: Any = trainer.model
    return seen | {"sizes": model.seen_sizes, "steps": trainer.state.global_step, "max_steps": trainer.state.max_steps}


def main(server_url: str, job_id: str, folder: str, *ways: str) -> None:
    """Train each way, and write what was seen to a file per process and way."""
    torch.set_num_threads(1)
    for way in ways:
        seen = train(server_url, f"{job_id}-{way.replace(' ', '-')}", Path(folder), way)
        Path(folder, f"{way} {seen['rank']}.json").write_text(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
