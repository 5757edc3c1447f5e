"""Tokens, requests with tokens, and their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.jobs import job
from tests.support.servers import bso_server


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


RESULT = {"time": 1, "energy": 1, "metric": 0.1, "current_epoch": 1}


def make_token(database_url: str, *scopes: str, options: Sequence[str] = ()) -> str:
    source = ["--database-url", database_url]
    made = bso_server("token", "create", "--name", "test", "--scope", *scopes, *options, *source)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


@dataclass(frozen=True)
class Tokens:
    """A token per scope, and a second token with the report scope."""

    read: str
    report: str
    other: str
    admin: str


@dataclass(frozen=True)
class Http:
    """Requests to a server, each with a token."""

    url: str

    def ask(self, method: str, path: str, token: str, **request: Any) -> httpx.Response:
        headers = bearer(token) | request.pop("headers", {})
        return httpx.request(method, self.url + path, headers=headers, **request)

    def begin(self, token: str, job_id: str | None = None) -> dict[str, Any]:
        """Begin a trial, by default of a separate job."""
        if job_id is None:
            job_id = self.ask("POST", "/jobs", token, json=job()).json()["job_id"]
        trial: dict[str, Any] = self.ask("GET", "/jobs/batch_size", token, params={"job_id": job_id}).json()
        return {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}

    def report(self, token: str, trial: dict[str, Any]) -> httpx.Response:
        return self.ask("POST", "/report", token, json={**trial, **RESULT})
