"""A process that trains endlessly and logs acknowledgements, safe from a SIGKILL.

Usage: ``python -m tests.chaos.client SERVER_URL LOG SEED GENERATION``. It trains the jobs of this generation. It
repeats each request until an answer arrives, unaware of the server's disasters, and then writes the answer
to LOG: one JSON object per line, on disk before the next request. It ends after any answer other than
success or 503 (retry).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.jobs import DEFAULT, EPOCH_J, Job, jobs, result

LONGEST_EPOCH_S = 0.01
RETRY_AFTER_S = 0.05
TIMEOUT_S = 60.0
CRASHES = 0.1
PREEMPTIONS = 0.1
NEVER_BACK = 0.2


class RefusedError(Exception):
    """The server blames the client, which is never at fault, or reports an internal error."""


class Client:
    """Train one trial of these jobs after another, and log the acknowledgements."""

    def __init__(self, jobs: Sequence[Job], server_url: str, log: Path, rng: random.Random) -> None:
        self._jobs = jobs
        # The server could process an abandoned request after the next request.
        self._http = httpx.Client(base_url=server_url, timeout=TIMEOUT_S)
        self._log = log.open("a")
        self._rng = rng

    def run(self) -> None:
        """Train until this process is killed or the server refuses a request."""
        for job in self._jobs:
            self._send("POST", "/jobs", json=job.body)
            self._write("registered", {"job_id": job.job_id})
        while True:
            self._train(self._rng.choice(self._jobs))

    def _train(self, job: Job) -> None:
        key = self._rng.randbytes(16).hex()
        trial = self._send("GET", "/jobs/batch_size", params={"job_id": job.job_id}, headers={"Idempotency-Key": key})
        trial = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
        self._write("dispatched", trial)
        if trial["batch_size"] == job.out_of_memory:
            self._end(trial, "infeasible")
            return
        # The default never crashes: see `jobs`.
        crashes = trial["batch_size"] > DEFAULT and self._rng.random() < CRASHES
        epoch_j = EPOCH_J * self._rng.uniform(0.9, 1.1)
        epoch = 0
        while True:
            time.sleep(self._rng.uniform(0, LONGEST_EPOCH_S))
            if crashes:
                self._end(trial, "failed")
                return
            if self._rng.random() < PREEMPTIONS:
                comes_back = self._rng.random() >= NEVER_BACK
                self._end(trial, "suspended", comes_back=comes_back)
                if not comes_back:
                    return
            if self._rng.random() < 0.5:
                self._send("PATCH", "/trials/heartbeat", json=trial)
            epoch += 1
            reported = result(trial["batch_size"], epoch, epoch_j)
            answer = self._send("POST", "/report", json=trial | reported)
            self._write("reported", trial, result=reported, answer=answer)
            if answer["stop_train"]:
                return

    def _end(self, trial: dict[str, Any], outcome: str, *, comes_back: bool = False) -> None:
        self._send("PATCH", "/trials", json=trial | {"outcome": outcome})
        self._write("ended", trial, outcome=outcome, comes_back=comes_back)

    def _send(self, method: str, path: str, **request: Any) -> Any:
        while True:
            try:
                answer = self._http.request(method, path, **request)
            except httpx.TransportError:
                time.sleep(RETRY_AFTER_S)
                continue
            if answer.is_success:
                return answer.json() if answer.content else None
            if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise RefusedError(f"{method} {path} {request}: {answer.status_code} {answer.text}")
            time.sleep(RETRY_AFTER_S)

    def _write(self, kind: str, about: dict[str, Any], **more: Any) -> None:
        self._log.write(json.dumps({"kind": kind, **about, **more}) + "\n")
        self._log.flush()
        os.fsync(self._log.fileno())


class DoneError(Exception):
    """Raised when a client has received its share of the answers."""


class BoundedClient(Client):
    """Client in a thread of the tests, which passes on each answer and raises `DoneError` after `left` answers."""

    def __init__(self, server_url: str, seed: int, left: int, keep: Callable[[dict[str, Any]], object]) -> None:
        super().__init__(jobs(0), server_url, Path(os.devnull), random.Random(seed))  # noqa: S311 - no secret
        self._log.close()
        self._left, self._keep = left, keep

    def run(self) -> None:
        with self._http:
            super().run()

    def _write(self, kind: str, about: dict[str, Any], **more: Any) -> None:
        self._keep({"kind": kind, **about, **more})
        self._left -= 1
        if self._left == 0:
            raise DoneError


if __name__ == "__main__":
    server_url, log, seed, generation = sys.argv[1:]
    chances = random.Random(int(seed))  # noqa: S311 - no secret
    Client(jobs(int(generation)), server_url, Path(log), chances).run()
