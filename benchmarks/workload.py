"""The trainings of a benchmark: their requests on the wire, and the answers that these must get.

Only what every server of the contract understands is sent, so that the same load can be put on a Zeus 0.16 server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from benchmarks.driver import Block
from benchmarks.errors import BenchmarkError
from benchmarks.player import encode
from zeus_plugins.protocol import Paths, TrialId

BATCH_SIZES = (32, 64, 128, 256)
TARGET_METRIC = 0.9
POWER_W = 200.0


class Job:
    """One recurring job and its encoded requests.

    Args:
        job_id: Its id.
        max_epochs: Epochs of its longest trial.
        pruning_rounds: How often every batch size is explored.
        policy: Its policy; None where the server chooses, as for Zeus's clients.
    """

    def __init__(self, job_id: str, *, max_epochs: int, pruning_rounds: int, policy: str | None = None) -> None:
        self.job_id = job_id
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
                "num_pruning_rounds": pruning_rounds,
                "max_power": 300.0,
                "number_of_gpus": 1,
                "gpu_model": "benchmark",
                # Every trial runs its epochs, whatever its policy thinks of it.
                **({} if policy is None else {"policy": policy, "beta_knob": None}),
            },
        )
        self.suggest = encode("GET", f"{Paths.BATCH_SIZE}?job_id={job_id}")
        self.page = encode("GET", f"/ui/jobs/{job_id}", headers={"Accept-Encoding": "gzip"})
        self.delete = encode("DELETE", f"{Paths.JOBS}?job_id={job_id}")


def report(trial: TrialId, *, epoch: int, epochs: int) -> bytes:
    """The report after an epoch; the last one reaches the target.

    What a whole trial costs differs from size to size and a little from trial to trial, by a fifth at most, so that all
    stay within the early-stop bound of twice the cheapest.
    """
    whole_s = 4.0 + 0.2 * BATCH_SIZES.index(trial.batch_size) + 0.001 * (trial.trial_number % 101)
    time_s = whole_s * epoch / epochs
    return encode(
        "POST",
        Paths.REPORT,
        {
            **_trial(trial),
            "time": time_s,
            "energy": POWER_W * time_s,
            "metric": TARGET_METRIC * (epoch / epochs if epoch < epochs else 1.05),
            "current_epoch": epoch,
        },
    )


def end(trial: TrialId) -> bytes:
    """The request that ends a trial which did not get anywhere."""
    return encode("PATCH", Paths.TRIALS, _trial(trial))


def _trial(trial: TrialId) -> dict[str, object]:
    return {"job_id": trial.job_id, "batch_size": trial.batch_size, "trial_number": trial.trial_number}


def dispatched(block: Block) -> list[list[TrialId]]:
    """The trials that a block of suggests started, per client."""
    return [[TrialId.model_validate_json(exchange.body) for exchange in played] for played in block.exchanges]


def expect(block: Block, *, stop_train: bool, converged: bool) -> None:
    """Make sure that the trials went as planned: an early stop would make later reports cheaper.

    Raises:
        BenchmarkError: A report was answered otherwise.
    """
    for exchange in _flat(block):
        answer = json.loads(exchange)
        if (answer["stop_train"], answer["converged"]) != (stop_train, converged):
            raise BenchmarkError(
                f"a report that should have been answered stop_train={stop_train}, converged={converged} "
                f"was answered {exchange.decode(errors='replace')}"
            )


def _flat(block: Block) -> Iterable[bytes]:
    return (exchange.body for played in block.exchanges for exchange in played)
