"""Requests with tokens, and what they send."""

from __future__ import annotations

import uuid
from typing import Any


def spec() -> dict[str, Any]:
    return {
        "job_id": f"job-{uuid.uuid4().hex[:8]}",
        "job_id_prefix": "job",
        "batch_sizes": [8, 16],
        "default_batch_size": 16,
        "max_power": 100.0,
        "number_of_gpus": 1,
        "gpu_model": "V100",
    }


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


RESULT = {"time": 1, "energy": 1, "metric": 0.1, "current_epoch": 1}
