"""The job of the tests, as a client registers it."""

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
# Explored in one round, smaller sizes first, within ten epochs each.
THREE_SIZES: dict[str, Any] = {"batch_sizes": [8, 16, 32], "max_epochs": 10, "num_pruning_rounds": 1, "mab_seed": 1}


def job(**changes: Any) -> dict[str, Any]:
    """The body of ``POST /jobs``.

    Args:
        changes: The fields that are other than in `JOB`. Unless they name it, the job has an id of its own; None leaves
            the id to the server. The prefix is the id's first word.
    """
    fields = {"job_id": f"job-{uuid.uuid4().hex[:8]}", **changes}
    prefix = (fields["job_id"] or JOB["job_id_prefix"]).partition("-")[0]
    return {**JOB, "job_id_prefix": prefix, **fields}
