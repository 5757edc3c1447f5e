"""Jobs of the chaos test's clients, with the behaviour of each batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EPOCH_J = 100.0
# Epochs that a batch size needs to reach the target. The default, 16, always reaches the target, and costs are slightly
# lower at 32, so that every job keeps a working batch size. 8 costs more than twice as much as 32.
EPOCHS = {8: 5, 16: 3, 32: 2, 64: 4}
DEFAULT = 16


@dataclass(frozen=True)
class Job:
    """A job as registered by a client, with the batch size that does not fit into memory."""

    body: dict[str, Any]
    out_of_memory: int | None = None

    @property
    def job_id(self) -> str:
        return str(self.body["job_id"])


def jobs(generation: int) -> tuple[Job, ...]:
    """Return the jobs of a generation; each generation has the same jobs under new ids, still unexplored."""

    def job(name: str, *, out_of_memory: int | None = None, **fields: Any) -> Job:
        body = {
            "job_id_prefix": "chaos",
            "job_id": f"chaos-{name}-{generation}",
            "batch_sizes": sorted(EPOCHS),
            "default_batch_size": DEFAULT,
            "eta_knob": 1.0,
            "target_metric": 0.9,
            "max_epochs": 10,
            "max_power": 300.0,
            "number_of_gpus": 1,
            "gpu_model": "V100",
        }
        return Job(body | fields, out_of_memory)

    return (
        job("bounded", out_of_memory=64, num_pruning_rounds=2, beta_knob=2.0, window_size=3, mab_seed=1),
        job("unbounded", num_pruning_rounds=1, beta_knob=None),
        job("without-exploration", num_pruning_rounds=0, mab_seed=2),
    )


def result(batch_size: int, epoch: int, epoch_j: float = EPOCH_J) -> dict[str, Any]:
    """Return the report of a training with this batch size after an epoch."""
    return {
        "time": epoch * 1.5,
        "energy": epoch * epoch_j,
        "metric": 0.95 if epoch >= EPOCHS[batch_size] else epoch / 100,
        "current_epoch": epoch,
    }
