"""How the training side reaches the batch size optimization server."""

from zeus_plugins.client.http import (
    EMBEDDED,
    NO_RETRIES,
    SERVER_URL_VARIABLE,
    TIMEOUT_VARIABLE,
    TOKEN_VARIABLE,
    BsoClient,
    Retries,
    client_from_environment,
)

__all__ = [
    "EMBEDDED",
    "NO_RETRIES",
    "SERVER_URL_VARIABLE",
    "TIMEOUT_VARIABLE",
    "TOKEN_VARIABLE",
    "BsoClient",
    "Retries",
    "client_from_environment",
]
