"""Requests with tokens, and what they send."""

from __future__ import annotations


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


RESULT = {"time": 1, "energy": 1, "metric": 0.1, "current_epoch": 1}
