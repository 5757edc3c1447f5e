"""Access of a training to a batch size optimization server; `ServerPort` is the interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeus_plugins.client.connect import client_from_environment
from zeus_plugins.client.port import (
    EMBEDDED,
    NO_RETRIES,
    Retries,
    ServerPort,
)

if TYPE_CHECKING:
    from zeus_plugins.client.http import BsoClient

__all__ = [
    "EMBEDDED",
    "NO_RETRIES",
    "BsoClient",
    "Retries",
    "ServerPort",
    "client_from_environment",
]


def __getattr__(name: str) -> Any:
    """Load `BsoClient` on first use, because a training without a server does not need the HTTP library."""
    if name == "BsoClient":
        from zeus_plugins.client.http import BsoClient

        return BsoClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
