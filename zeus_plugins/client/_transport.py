"""The network under `http.py`: one deadline for a whole exchange, and no proxy between this machine and itself.

The HTTP library's time-outs are for each wait: a server that sends a byte now and then is waited for without end. Here
a request's time-out is that of connecting, sending and receiving together, by the monotonic clock.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

from zeus_plugins.errors import ZeusBSOConfigError


def proxy_of(url: httpx.URL) -> str | None:
    """The proxy that the environment names for a URL: none for this machine, which would show it the token."""
    if _is_this_machine(url.host) or proxy_bypass(url.netloc.decode("ascii")):
        return None
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


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


class DeadlineTransport(httpx.BaseTransport):
    """Connections to servers of one scheme, each exchange within its request's time-out as a whole.

    Args:
        is_encrypted: Whether certificates are needed.
        proxy: URL of the proxy on the way.

    Raises:
        ZeusBSOConfigError: There cannot be such a proxy.
    """

    def __init__(self, *, is_encrypted: bool, proxy: str | None = None) -> None:
        try:
            self._pool = httpcore.ConnectionPool(
                ssl_context=httpx.create_ssl_context() if is_encrypted else None,
                proxy=None if proxy is None else _proxy(httpx.Proxy(proxy)),
                network_backend=_Network(),
            )
        except (ValueError, httpx.InvalidURL, ImportError, RuntimeError):
            # Its URL may hold a password.
            raise ZeusBSOConfigError(
                "the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names cannot be used (one with socks:// takes: "
                "pip install 'httpx[socks]'): mend it, or name the server's host in NO_PROXY"
            ) from None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and receive the head of its answer; the body comes as it is read."""
        deadline = time.monotonic() + request.extensions["timeout"]["read"]
        # `_Stream` takes what it is handed as a time-out for the deadline.
        waits = {"connect": deadline, "read": deadline, "write": deadline}
        with _translated():
            answer = self._pool.handle_request(
                httpcore.Request(
                    method=request.method,
                    url=_url(request.url),
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions={**request.extensions, "timeout": waits},
                )
            )
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_Body(answer), extensions=dict(answer.extensions)
        )

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        with _translated():
            yield from self._answer.iter_stream()

    def close(self) -> None:
        self._answer.close()


class _Network(httpcore.NetworkBackend):
    """Connects within a deadline, at which a host's addresses share what time there is."""

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
                return _Stream(
                    network.connect_tcp(
                        address,
                        port,
                        timeout=None if wait_s is None else wait_s / (len(addresses) + 1),
                        local_address=local_address,
                        socket_options=socket_options,
                    )
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if not addresses:
                    raise


class _Stream(httpcore.NetworkStream):
    """A connection that takes deadlines for time-outs."""

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
    """Seconds until the deadline."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise error("the deadline of the request is over")
    return left


def _url(url: httpx.URL) -> httpcore.URL:
    return httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)


def _proxy(proxy: httpx.Proxy) -> httpcore.Proxy:
    return httpcore.Proxy(url=_url(proxy.url), auth=proxy.raw_auth, headers=proxy.headers.raw)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise the HTTP library's errors in place of those of the layer under it."""
    try:
        yield
    except httpcore.TimeoutException as error:
        raise httpx.ReadTimeout(str(error)) from error
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError) as error:
        raise httpx.NetworkError(str(error)) from error
    except (httpcore.UnsupportedProtocol, httpcore.ConnectionNotAvailable) as error:
        raise httpx.TransportError(str(error)) from error
