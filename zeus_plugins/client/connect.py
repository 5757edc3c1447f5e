"""The choice of a `ServerPort` by arguments and environment: over HTTP, or in this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeus_plugins import environment
from zeus_plugins.client.port import DEFAULT_TIMEOUT_S, EMBEDDED
from zeus_plugins.errors import ZeusBSOConfigError

if TYPE_CHECKING:
    from zeus_plugins.client.http import BsoClient
    from zeus_plugins.client.local import LocalServer

_logger = logging.getLogger("zeus_plugins")


def check_server_url(server_url: str | None) -> None:
    """Raise `ZeusBSOConfigError` unless a URL begins with ``http://``, ``https://`` or ``embedded:``; accept None.

    The client itself checks the parts of an ``http://`` URL.
    """
    scheme, separator, _ = (server_url or "").strip().partition("://")
    if server_url and not server_url.strip().startswith(EMBEDDED) and scheme.lower() not in ("http", "https"):
        # Do not quote a text without a scheme: it may contain a password.
        beginning = f" begins with {scheme}://, and" if separator else ""
        raise ZeusBSOConfigError(
            f"server_url{beginning} must be http:// or https:// with a host, for example http://127.0.0.1:8000, or "
            "embedded:///FILE for a server in this process on a SQLite file"
        )


def client_from_environment(
    server_url: str | None = None,
    token: str | None = None,
    *,
    timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> BsoClient | LocalServer:
    """Make a client; missing arguments come from ``ZEUS_SERVER_URL`` and ``ZEUS_BSO_TOKEN`` (or the token's file).

    Without a server URL, the server runs in this process, on the default file of ``bso-server``.

    Args:
        server_url: As in `BsoClient`; ``embedded:`` or ``embedded:///path`` is the server in this process.
        token: As in `BsoClient`. The server in this process takes no token.
        timeout_s: Longest wait in seconds for a request, with its retries. None: the environment variable
            ``ZEUS_BSO_TIMEOUT_S``, else 10 s.
        environ: Environment variables, by default the process's own.

    Raises:
        ZeusBSOConfigError: An argument is invalid, a variable is invalid or no longer read, or there is no server URL
            and the server is not installed here.
    """
    environment.refuse_gone(environ)
    url = (server_url if server_url is not None else environment.SERVER_URL.text(environ)) or ""
    check_server_url(url)
    if timeout_s is None:
        timeout_s = environment.TIMEOUT_S.number(environ, is_positive=True) or DEFAULT_TIMEOUT_S
    token = token if token is not None else environment.access_token(environ)
    if not url and token:
        _logger.warning(
            "there is a token (token= or %s) but no server URL: the server in this process is used, which takes no "
            "token. For a server elsewhere pass server_url= or set %s",
            environment.TOKEN,
            environment.SERVER_URL,
        )
    # Load only the modules that this client needs.
    if url and not url.strip().startswith(EMBEDDED):
        from zeus_plugins.client.http import BsoClient

        return BsoClient(url, token=token, timeout_s=timeout_s)
    try:
        from zeus_plugins.client.local import LocalServer
    except ModuleNotFoundError as error:
        raise ZeusBSOConfigError(
            f"there is no server URL, and the server cannot run in this process, as {error.name} is not installed: "
            f"pip install 'zeus-plugins[server]'; or name a running server, server_url=http://HOST:PORT or "
            f"{environment.SERVER_URL}=http://HOST:PORT"
        ) from None
    return LocalServer(url.strip() or EMBEDDED, timeout_s=timeout_s)
