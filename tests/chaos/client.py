"""A process that trains without end, and keeps what the server acknowledged where a SIGKILL cannot take it away.

Usage: ``python -m tests.chaos.client SERVER_URL LOG SEED``. It sends each request until it is answered, as if it knew
nothing of what happens to the server, and only then writes the answer to LOG: one JSON object per line, on the disk
before the next request.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.jobs import DEFAULT, EPOCH_J, EPOCHS, JOBS, Job

LONGEST_EPOCH_S = 0.01
RETRY_AFTER_S = 0.05
CRASHES = 0.1
PREEMPTIONS = 0.1
NEVER_BACK = 0.2


class RefusedError(Exception):
    """The server says that the client is at fault. It never is."""


class Client:
    """Trains one trial after another.

    Args:
        server_url: The server.
        log: Where to write what was acknowledged.
        rng: Decides on everything that is left to chance.
    """

    def __init__(self, server_url: str, log: Path, rng: random.Random) -> None:
        self._http = httpx.Client(base_url=server_url)
        self._log = log.open("a")
        self._rng = rng

    def run(self) -> None:
        """Train until this process is killed.

        Raises:
            RefusedError: The server refused something.
        """
        for job in JOBS:
            self._send("POST", "/jobs", json=job.body)
        while True:
            self._train(self._rng.choice(JOBS))

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
                self._end(trial, "suspended")
                if self._rng.random() < NEVER_BACK:
                    return
            if self._rng.random() < 0.5:
                self._send("PATCH", "/trials/heartbeat", json=trial)
            epoch += 1
            result = {
                "time": epoch * 1.5,
                "energy": epoch * epoch_j,
                "metric": 0.95 if epoch >= EPOCHS[trial["batch_size"]] else epoch / 100,
                "current_epoch": epoch,
            }
            answer = self._send("POST", "/report", json=trial | result)
            self._write("reported", trial, result=result, answer=answer)
            if answer["stop_train"]:
                return

    def _end(self, trial: dict[str, Any], outcome: str) -> None:
        self._send("PATCH", "/trials", json=trial | {"outcome": outcome})
        self._write("ended", trial, outcome=outcome)

    def _send(self, method: str, path: str, **request: Any) -> Any:
        while True:
            try:
                answer = self._http.request(method, path, **request)
            except httpx.TransportError:
                time.sleep(RETRY_AFTER_S)
                continue
            if answer.is_success:
                return answer.json() if answer.content else None
            if not answer.is_server_error:
                raise RefusedError(f"{method} {path} {request}: {answer.status_code} {answer.text}")
            time.sleep(RETRY_AFTER_S)

    def _write(self, kind: str, about: dict[str, Any], **more: Any) -> None:
        self._log.write(json.dumps({"kind": kind, **about, **more}) + "\n")
        self._log.flush()
        os.fsync(self._log.fileno())


if __name__ == "__main__":
    Client(sys.argv[1], Path(sys.argv[2]), random.Random(int(sys.argv[3]))).run()  # noqa: S311 - no secret
