"""The HTTP requests of a fleet of trainings, and the figures of their answers.

The client shares the machine with the server that it measures. Requests are therefore encoded by hand, and each request
opens a connection of its own, like the requests of a real training.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.processes import BenchmarkError, Target
from zeus_plugins.protocol import Paths, TrialId

SUCCESS = range(200, 300)
NO_ANSWER = 0
"""The status under which requests without an answer are counted."""

REGISTER = "POST /jobs"
SUGGEST = "GET /jobs/batch_size"
EPOCH_REPORT = "POST /report (epoch)"
FINAL_REPORT = "POST /report (final)"
HEARTBEAT = "PATCH /trials/heartbeat"

BATCH_SIZES = (32, 64, 128, 256)
TARGET_METRIC = 0.9
POWER_W = 200.0

_HEAD_END = b"\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)


class Exchange(NamedTuple):
    """The answer to one request: its HTTP status and its body."""

    status: int
    body: bytes


async def exchange(target: Target, request: bytes) -> Exchange:
    """Send an encoded request on a new connection and return the answer.

    Raises:
        BenchmarkError: The server did not answer.
    """
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            writer.write(request)
            head = await reader.readuntil(_HEAD_END)
            length = _CONTENT_LENGTH.search(head)
            return Exchange(int(head[9:12]), await reader.readexactly(int(length[1]) if length else 0))
        finally:
            writer.close()
    except (OSError, EOFError) as error:
        raise BenchmarkError(f"no answer from {target.host}:{target.port}: {error!r}") from error


def encode(method: str, target: str, body: Mapping[str, object] | None = None) -> bytes:
    """Return a whole HTTP/1.1 request; `target` is the quoted path and query, `body` is sent as JSON."""
    head = [f"{method} {target} HTTP/1.1", "Host: localhost", "Accept: application/json"]
    payload = b"" if body is None else json.dumps(body).encode()
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    return "\r\n".join(head).encode() + _HEAD_END + payload


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


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Figures of one kind of request.

    Attributes:
        request: Method and path.
        due: Number of requests.
        answers: Number of answers per HTTP status; requests without an answer are counted under 0.
        p50_ms: Median latency of the answered requests.
        p99_ms: 99th percentile of the latency of the answered requests.
    """

    request: str
    due: int
    answers: dict[str, int]
    p50_ms: float
    p99_ms: float

    @property
    def failures(self) -> int:
        """Number of requests without an answer, or with an answer that is no success."""
        return sum(number for status, number in self.answers.items() if int(status) not in SUCCESS)


@dataclass(slots=True)
class Tally:
    """Answers and latencies of one kind of request, added up."""

    answers: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)

    def add(self, status: int, latency_s: float) -> None:
        """Count one answer."""
        self.answers[status] += 1
        self.latencies_s.append(latency_s)

    def figures(self, request: str) -> RequestFigures:
        """Return the figures of all counted requests."""
        ascending_ms = sorted(1e3 * latency_s for latency_s in self.latencies_s) or [0.0]
        return RequestFigures(
            request=request,
            due=self.answers.total(),
            answers={str(status): number for status, number in sorted(self.answers.items())},
            p50_ms=percentile(ascending_ms, 0.50),
            p99_ms=percentile(ascending_ms, 0.99),
        )


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the percentile by nearest rank: the smallest value that at least `share` of the values do not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
