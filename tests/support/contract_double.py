"""A batch size optimization server in memory: the wire contract with answers prepared by a test."""

from __future__ import annotations

import json
from typing import Any

import httpx

from zeus_plugins.client.http import BsoClient

KEEP_TRAINING = {"stop_train": False, "converged": False, "message": "keep training"}
CONVERGED = {"stop_train": True, "converged": True, "message": "target reached"}
COST_BOUND = {"stop_train": True, "converged": False, "message": "cost bound crossed"}


# A Zeus server ignores these fields, which our client sends as null unless a server has sent values for them.
UNKNOWN = {"fingerprint", "registration_id", "lease_epoch", "dispatch_id", "rank"}


class ContractDouble:
    """Answer like a Zeus 0.16 server, with the required fields only, and record every request.

    Args:
        verdicts: Answers of ``POST /report``, in order. An int is an HTTP status to fail with.
        batch_size: The size to dispatch.
    """

    def __init__(self, *verdicts: dict[str, Any] | int, batch_size: int = 64) -> None:
        self.verdicts = list(verdicts)
        self.batch_size = batch_size
        self.requests: list[tuple[str, str, Any]] = []
        self.down, self.attempts_while_down = False, 0

    def client(self) -> BsoClient:
        return BsoClient("http://bso", transport=httpx.MockTransport(self))

    def sent(self, method: str, path: str) -> list[Any]:
        """Return the bodies of all requests of this kind."""
        return [body for (m, p, body) in self.requests if (m, p) == (method, path)]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            self.attempts_while_down += 1
            raise httpx.ConnectError("Connection refused", request=request)
        body: Any = json.loads(request.content) if request.content else None
        if body is not None:
            body = {name: value for name, value in body.items() if value is not None or name not in UNKNOWN}
        self.requests.append((request.method, request.url.path, body))
        match request.method, request.url.path:
            case "POST", "/jobs":
                made = body["job_id"] or f"{body['job_id_prefix']}-0badcafe"
                return httpx.Response(201, json={**body, "job_id": made})
            case "GET", "/jobs/batch_size":
                job_id = request.url.params["job_id"]
                return httpx.Response(200, json={"job_id": job_id, "batch_size": self.batch_size, "trial_number": 7})
            case "POST", "/report":
                verdict = self.verdicts.pop(0)
                if isinstance(verdict, int):
                    return httpx.Response(verdict, json={"message": "as the test asked"})
                return httpx.Response(200, json=verdict)
            case "PATCH", "/trials":
                return httpx.Response(200, json=None)
            case "POST", "/trials":  # no route of Zeus's
                return httpx.Response(405, json={"message": "Method Not Allowed"})
            case "GET", path if path.startswith("/api/jobs/"):  # for people only: a training continues without
                return httpx.Response(404, json={"message": "no such page"})
        raise AssertionError(f"not in the contract: {request.method} {request.url}")
