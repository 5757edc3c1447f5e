"""A recurring job played in the same way on any server with Zeus's protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import httpx

ZEUS_JOB: dict[str, Any] = {
    "job_id_prefix": "moved",
    "job_id": "moved",
    "batch_sizes": [8, 16, 32, 64, 128],
    "default_batch_size": 32,
    "eta_knob": 0.5,
    "beta_knob": 2.0,
    "target_metric": 0.9,
    "higher_is_better_metric": True,
    "max_epochs": 5,
    "num_pruning_rounds": 2,
    "window_size": 0,
    "mab_prior_mean": 0.0,
    "mab_prior_precision": 0.0,
    "mab_num_explorations": 2,
    "mab_seed": 7,
    "max_power": 600.0,
    "number_of_gpus": 2,
    "gpu_model": "V100",
}

# Joules of a run; 8 never reaches the target, and 128 is too expensive.
_COSTS = {8: 900.0, 16: 520.0, 32: 500.0, 64: 510.0, 128: 1400.0}


@dataclass
class Player:
    """Trainings of one job; occasionally two run at once, or one crashes. Trials determine the reports.

    Attributes:
        http: The server.
        job_id: The job.
        running: Trials that were begun and have not ended.
        sizes: The batch sizes that were suggested, in order.
    """

    http: httpx.Client
    job_id: str
    running: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def begin(self) -> None:
        answer = self.http.get("/jobs/batch_size", params={"job_id": self.job_id}).raise_for_status().json()
        trial = {name: answer[name] for name in ("job_id", "batch_size", "trial_number")}
        self.running.append(trial)
        self.sizes.append(trial["batch_size"])

    def end(self) -> None:
        """End the trial begun last."""
        trial = self.running.pop()
        size, number = trial["batch_size"], trial["trial_number"]
        if number % 9 == 4:
            self.http.patch("/trials", json=trial).raise_for_status()
            return
        cost_j = _COSTS[size] * (1 + 0.2 * math.sin(number * size))
        end = {"time": cost_j / 600, "energy": cost_j, "metric": 0.5 if size == 8 else 0.95, "current_epoch": 5}
        self.http.post("/report", json={**trial, **end}).raise_for_status()

    def recur(self, recurrences: int) -> list[int]:
        """Run `recurrences` trainings from begin to end, occasionally one concurrently; return their sizes."""
        first = len(self.sizes)
        while len(self.sizes) < first + recurrences:
            self.begin()
            if self.running[-1]["trial_number"] % 3 == 2:
                self.begin()
                self.end()
            self.end()
        return self.sizes[first:]
