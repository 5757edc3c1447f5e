"""A Trainer's training on two processes under FSDP; each process writes down its observations.

Usage: ``python -m tests.support.hf_sharded_training SERVER_URL JOB_ID FOLDER WAY…``, as a rank of two.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from tests.support.hf_bench import Tokens, quiet_trainer, tiny_bert
from tests.support.job_bench import seconds_and_joules
from tests.support.process_end import leave
from zeus_plugins import JobSpec
from zeus_plugins.huggingface import ZeusBSOTrainerCallback

RATE = 0.1  # for the job's default size

FSDP: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}}


class LatestRates(TrainerCallback):
    """Record the rates of the latest step, because rates of reused optimizers are restored after the training."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.rates = [group["lr"] for group in kwargs["optimizer"].param_groups]


# Arguments of the Trainer, and of the callback.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": (FSDP, {}),
    "fsdp scaled": (FSDP, {"lr_scaling": "auto"}),
    "fsdp accumulation": ({**FSDP, "gradient_accumulation_steps": 2}, {}),
}


def shard_on_the_cpu() -> None:
    """Let accelerate shard models as FSDP does; accelerate skips this without a GPU, although torch supports it."""
    construct = AcceleratorState.__init__

    @functools.wraps(construct)
    def construct_sharding(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)

    vars_of_class: Any = AcceleratorState
    vars_of_class.__init__ = construct_sharding


def train(server_url: str, job_id: str, folder: Path, way: str) -> dict[str, Any]:
    """Train one epoch.

    Returns:
        Observations of this process.
    """
    job = JobSpec.model_validate_json((folder / "job.json").read_text())
    job = job.model_copy(update={"job_id": job_id})
    options, arguments = WAYS[way]
    monitor = seconds_and_joules(1.0, 10.0)
    callback = ZeusBSOTrainerCallback(job, "score", server_url=server_url, energy_monitor=monitor, **arguments)
    latest = LatestRates()
    trainer = quiet_trainer(
        folder / "checkpoints",
        callback,
        latest,
        ddp_backend="gloo",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        trainer_options={"model": tiny_bert(), "train_dataset": Tokens(), "eval_dataset": Tokens()},
        **options,
    )
    trainer.train()
    weights = trainer.optimizer.param_groups[0]["params"]  # type: ignore[union-attr, unused-ignore]
    model: Any = trainer.model
    return {
        "rank": trainer.args.process_index,
        "is_sharded": all(isinstance(each, DTensor) for each in weights),
        "sizes": vars(model).get("seen_sizes", []),
        "steps": trainer.state.global_step,
        "rates": latest.rates,
        "size_afterwards": trainer.args.per_device_train_batch_size,
        "rate_afterwards": trainer.args.learning_rate,
    }


def main(server_url: str, job_id: str, folder: str, *ways: str) -> None:
    """Train each way, and write the observations to a file per process and way."""
    torch.set_num_threads(1)
    shard_on_the_cpu()
    for way in ways:
        seen = train(server_url, f"{job_id}-{way.replace(' ', '-')}", Path(folder), way)
        Path(folder, f"{way} {seen['rank']}.json").write_text(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
