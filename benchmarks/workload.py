"""The HTTP requests of the trainings of a load.

All requests except heartbeats are part of the protocol that Zeus 0.16's server understands, too, so that it gets the
same load. Heartbeats are sent only by the fleet, which does not run on Zeus's server.
"""

from __future__ import annotations

from benchmarks.driver import Exchange, encode
from zeus_plugins.protocol import Paths, TrialId

REGISTER = "POST /jobs"
SUGGEST = "GET /jobs/batch_size"
EPOCH_REPORT = "POST /report (epoch)"
FINAL_REPORT = "POST /report (final)"
HEARTBEAT = "PATCH /trials/heartbeat"

BATCH_SIZES = (32, 64, 128, 256)
TARGET_METRIC = 0.9
POWER_W = 200.0


class Job:
    """One recurring job and its encoded requests.

    Args:
        job_id: Id of the job.
        max_epochs: Epochs of the job's longest trial.
    """

    def __init__(self, job_id: str, *, max_epochs: int) -> None:
        self.registration = encode(
            "POST",
            Paths.JOBS,
            {
                "job_id": job_id,
                "job_id_prefix": job_id,
                "batch_sizes": BATCH_SIZES,
                "default_batch_size": BATCH_SIZES[2],
                "target_metric": TARGET_METRIC,
                "max_epochs": max_epochs + 1,
                "num_pruning_rounds": 2,
                "max_power": 300.0,
                "number_of_gpus": 1,
                "gpu_model": "benchmark",
            },
        )
        self.suggest = encode("GET", f"{Paths.BATCH_SIZE}?job_id={job_id}")


def report(trial: TrialId, *, epoch: int, epochs: int) -> bytes:
    """Return the report after an epoch; the last epoch's report reaches the target.

    The cost of a whole trial depends on the size, and slightly on the trial. Costs differ by a fifth at most, so that
    no trial reaches the early-stop bound of twice the cheapest trial's cost.
    """
    whole_s = 4.0 + 0.2 * BATCH_SIZES.index(trial.batch_size) + 0.001 * (trial.trial_number % 101)
    time_s = whole_s * epoch / epochs
    return encode(
        "POST",
        Paths.REPORT,
        {
            **_fields(trial),
            "time": time_s,
            "energy": POWER_W * time_s,
            "metric": TARGET_METRIC * (epoch / epochs if epoch < epochs else 1.05),
            "current_epoch": epoch,
        },
    )


def heartbeat(trial: TrialId) -> bytes:
    """Return a trial's heartbeat."""
    return encode("PATCH", Paths.HEARTBEAT, _fields(trial))


def begun_trial(answer: Exchange) -> TrialId:
    """Return the trial that the server began with its answer to a suggestion request."""
    return TrialId.model_validate_json(answer.body)


def _fields(trial: TrialId) -> dict[str, object]:
    return {"job_id": trial.job_id, "batch_size": trial.batch_size, "trial_number": trial.trial_number}
