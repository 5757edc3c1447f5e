"""The way to a server: over HTTP, or in this process, by what the user says and the environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeus_plugins import environment
from zeus_plugins.client.port import DEFAULT_TIMEOUT_S, EMBEDDED, SERVER_URL_VARIABLE, TOKEN_VARIABLE
from zeus_plugins.errors import ZeusBSOConfigError

if TYPE_CHECKING:
    from zeus_plugins.client.http import BsoClient
    from zeus_plugins.client.local import LocalServer


_logger = logging.getLogger("zeus_plugins")


def client_from_environment(
    server_url: str | None = None,
    token: str | None = None,
    *,
    timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> BsoClient | LocalServer:
    """Make a client; arguments that are not given come from ``ZEUS_SERVER_URL`` and ``ZEUS_BSO_TOKEN`` or its file.

    Without a server URL, the server runs in this process, on the file that ``bso-server`` works on by default.

    Args:
        server_url: As in `BsoClient`; ``embedded:`` or ``embedded:///path`` is the server in this process.
        token: As in `BsoClient`. The server in this process is not shown it.
        timeout_s: Longest wait in seconds for an answer as a whole. None: the environment variable
            ``ZEUS_BSO_TIMEOUT_S``, else 10 s.
        environ: Environment variables; those of the process by default.

    Raises:
        ZeusBSOConfigError: An argument cannot work, or there is no server URL and the server is not installed here.
    """
    url = (server_url if server_url is not None else environment.SERVER_URL.text(environ)) or ""
    if timeout_s is None:
        timeout_s = environment.TIMEOUT_S.number(environ, is_positive=True) or DEFAULT_TIMEOUT_S
    token = token if token is not None else environment.access_token(environ)
    if not url and token:
        _logger.warning(
            "there is a token (token= or %s) but no server URL: the server in this process is used, which takes no "
            "token. For a server elsewhere pass server_url= or set %s",
            TOKEN_VARIABLE,
            SERVER_URL_VARIABLE,
        )
    if not url or url.strip().startswith(EMBEDDED):
        return _local_server(url.strip() or EMBEDDED, timeout_s)
    # Each way loads only what it needs.
    from zeus_plugins.client.http import BsoClient

    return BsoClient(url, token=token, timeout_s=timeout_s)


def _local_server(server_url: str, timeout_s: float) -> LocalServer:
    try:
        from zeus_plugins.client.local import LocalServer
    except ModuleNotFoundError as error:
        raise ZeusBSOConfigError(
            f"there is no server URL, and the server cannot run in this process, as {error.name} is not installed: "
            f"pip install 'zeus-plugins[server]'; or name a running server, server_url=http://HOST:PORT or "
            f"{SERVER_URL_VARIABLE}=http://HOST:PORT"
        ) from None
    return LocalServer(server_url, timeout_s=timeout_s)
