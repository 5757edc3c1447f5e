"""The findings of a demo, and their file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zeus_plugins.protocol import JobView

_TRIAL_FIELDS = {
    "trial_number",
    "batch_size",
    "state",
    "time_s",
    "energy_j",
    "energy_source",
    "cost_j",
    "epochs",
    "metric",
}


@dataclass(frozen=True)
class Outcome:
    """The findings of a demo.

    Attributes:
        job: The job with all its trials, as the server tells it.
        recurrences: Number of recurrences.
        wall_s: Seconds that all of it took, server start and process starts included.
        database_url: The database, for `bso-server` to show the trials again.
        directory: The directory of `summary.json` and `costs.png`.
    """

    job: JobView
    recurrences: int
    wall_s: float
    database_url: str
    directory: Path

    @property
    def mean_cost_j(self) -> dict[int, float | None]:
        """Mean cost of each batch size, joules; None where it is not known."""
        return {arm.batch_size: arm.mean_cost_j for arm in self.job.arms}

    @property
    def cost_ratio(self) -> float | None:
        """Mean cost at the best batch size over mean cost at the default one; None where one of them is not known."""
        default_j = self.mean_cost_j[self.job.job.default_batch_size]
        best_j = None if self.job.best_batch_size is None else self.mean_cost_j[self.job.best_batch_size]
        return None if default_j is None or best_j is None else best_j / default_j

    def write_summary(self) -> None:
        """Write `summary.json`."""
        summary = {
            "policy": self.job.job.policy,
            "recurrences": self.recurrences,
            "trials": [trial.model_dump(mode="json", include=_TRIAL_FIELDS) for trial in self.job.trials],
            "best_batch_size": self.job.best_batch_size,
            "default_batch_size": self.job.job.default_batch_size,
            "cost_ratio_best_to_default": self.cost_ratio,
            "database": self.database_url,
            "wall_s": round(self.wall_s, 1),
        }
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
