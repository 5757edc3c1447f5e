"""Job of the tests, as registered by a client."""

from __future__ import annotations

import uuid
from typing import Any

JOB: dict[str, Any] = {
    "job_id_prefix": "job",
    "batch_sizes": [8, 16],
    "default_batch_size": 16,
    "target_metric": 0.9,
    "max_power": 100.0,
    "number_of_gpus": 1,
    "gpu_model": "V100",
}
# One round of exploration, smaller sizes first, with at most ten epochs each.
THREE_SIZES: dict[str, Any] = {"batch_sizes": [8, 16, 32], "max_epochs": 10, "num_pruning_rounds": 1, "mab_seed": 1}


def job(**changes: Any) -> dict[str, Any]:
    """Return the body of ``POST /jobs``.

    Args:
        changes: Fields that differ from `JOB`. By default, the job has a unique id; with None, the server
            chooses the id. The prefix is the id's first word.
    """
    fields = {"job_id": f"job-{uuid.uuid4().hex[:8]}", **changes}
    prefix = (fields["job_id"] or JOB["job_id_prefix"]).partition("-")[0]
    return {**JOB, "job_id_prefix": prefix, **fields}
