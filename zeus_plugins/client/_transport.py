"""The network under `http.py`: one deadline for a whole exchange, and no proxy for servers on this machine.

The time-outs of httpx limit each wait, so a server that sends a byte now and then could be waited for without end. Here
a request's time-out limits connecting, sending and receiving together, on the monotonic clock.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from collections.abc import Iterable
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

from zeus_plugins.errors import ZeusBSOConfigError


def _proxy_of(url: httpx.URL) -> httpcore.Proxy | None:
    """Return the proxy that the environment names for a URL, or None for this machine: a proxy would see the token."""
    if _is_this_machine(url.host) or proxy_bypass(url.netloc.decode("ascii")):
        return None
    proxies = getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named:
        return None
    proxy = httpx.Proxy(named if "://" in named else f"http://{named}")
    address = httpcore.URL(
        scheme=proxy.url.raw_scheme, host=proxy.url.raw_host, port=proxy.url.port, target=proxy.url.raw_path
    )
    return httpcore.Proxy(url=address, auth=proxy.raw_auth, headers=proxy.headers.raw)


def _is_this_machine(host: str) -> bool:
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class DeadlineTransport(httpx.HTTPTransport):
    """Connections to one server, each exchange within its request's time-out as a whole.

    Raises:
        ZeusBSOConfigError: The environment names a proxy that cannot be used.
    """

    def __init__(self, server_url: str) -> None:
        url = httpx.URL(server_url)
        try:
            # httpx has no public way to replace the network under its connections. It uses the pool for all else.
            self._pool = httpcore.ConnectionPool(
                ssl_context=httpx.create_ssl_context() if url.scheme == "https" else None,
                proxy=_proxy_of(url),
                network_backend=_Network(),
            )
        except (ValueError, httpx.InvalidURL, ImportError, RuntimeError):
            # Do not chain the error: it may quote a password in the proxy's URL.
            raise ZeusBSOConfigError(
                "the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names cannot be used (one with socks:// takes: "
                "pip install 'httpx[socks]'): mend it, or name the server's host in NO_PROXY"
            ) from None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and receive the head of its answer; iterating the stream receives the body."""
        # `_Stream` reads each time-out as a deadline. The request itself stays as it is, because it may be sent again.
        deadline = time.monotonic() + request.extensions["timeout"]["read"]
        extensions = {**request.extensions, "timeout": dict.fromkeys(("connect", "read", "write"), deadline)}
        return super().handle_request(
            httpx.Request(
                request.method, request.url, headers=request.headers, stream=request.stream, extensions=extensions
            )
        )


class _Network(httpcore.NetworkBackend):
    """Connects before a deadline; the host's addresses share the remaining time."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            found = dict.fromkeys(str(at[0]) for *_, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        addresses, network = list(found), httpcore.SyncBackend()
        while True:
            wait_s = _left(timeout, httpcore.ConnectTimeout)
            address = addresses.pop(0)
            try:
                share_s = None if wait_s is None else wait_s / (len(addresses) + 1)
                return _Stream(network.connect_tcp(address, port, share_s, local_address, socket_options))
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if not addresses:
                    raise


class _Stream(httpcore.NetworkStream):
    """A connection whose time-outs are deadlines."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float | None, error: type[Exception]) -> float | None:
    """Return the seconds until a deadline; raise `error` if there are none."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise error("the deadline of the request is over")
    return left
