"""The network layer of `http.py`: one deadline for a whole exchange, and no proxy for servers on this machine.

The time-outs of httpx limit each single wait, so a server that sends a byte now and then could delay a request forever.
Here, a request's time-out limits name lookup, connecting, sending and receiving together, by the monotonic clock.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

from zeus_plugins.errors import ZeusBSOServerUnreachableError

# Share of a request's time for connecting: the rest is left to try another connection, perhaps to another replica.
CONNECT_SHARE = 0.5

# Seconds that a connection waits for a lookup if earlier addresses of the name are known.
_LATE_LOOKUP_S = 1.0


def _proxy_of(url: httpx.URL) -> httpcore.Proxy | None:
    """Return the environment's proxy for a URL; None for this machine, because a proxy would see the token."""
    if _is_this_machine(url.host) or proxy_bypass(url.netloc.decode("ascii")):
        return None
    proxies = getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named:
        return None
    proxy = httpx.Proxy(named if "://" in named else f"http://{named}")
    if not proxy.url.host:
        raise ValueError("no host")
    if proxy.url.scheme.startswith("socks") and find_spec("socksio") is None:
        # httpcore would import the package during the first request.
        raise ValueError("no package for SOCKS")
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
    """Connections to one server, on which each whole exchange ends within its request's time-out.

    Raises:
        ZeusBSOServerUnreachableError: The environment names a proxy that cannot be used.
    """

    def __init__(self, server_url: str) -> None:
        url = httpx.URL(server_url)
        try:
            # httpx has no public way to replace only the network under its connections, so replace its whole pool.
            self._pool = httpcore.ConnectionPool(
                ssl_context=httpx.create_ssl_context() if url.scheme == "https" else None,
                proxy=_proxy_of(url),
                network_backend=_Network(),
            )
        except (ValueError, httpx.InvalidURL):
            # Do not chain the error: it may quote a password in the proxy's URL.
            raise ZeusBSOServerUnreachableError(
                f"no connection to {url.host}: the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used. "
                "Correct the variable (socks5:// needs: pip install 'httpx[socks]'), or add the host to NO_PROXY"
            ) from None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and receive the head of its answer; iterating the stream receives the body."""
        # `_Stream` reads each time-out as a deadline. Send a copy of the request, because it may be sent again.
        now, limit_s = time.monotonic(), request.extensions["timeout"]["read"]
        deadlines = {"connect": now + CONNECT_SHARE * limit_s, "read": now + limit_s, "write": now + limit_s}
        extensions = {**request.extensions, "timeout": deadlines}
        sent = httpx.Request(
            request.method, request.url, headers=request.headers, stream=request.stream, extensions=extensions
        )
        try:
            return super().handle_request(sent)
        except httpx.TransportError:
            raise
        except Exception as error:
            # httpcore passes on errors of its SOCKS library. Convert them: a network error must not end a training.
            raise httpx.NetworkError(f"{type(error).__name__}: {error}") from error


class _Lookup(threading.Thread):
    """A lookup of a name, in a thread that a caller may stop waiting for.

    The lookup of the system has no time-out; a DNS server that does not answer delays it by up to 40 s.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name="zeus-bso-lookup", daemon=True)
        self._place = host, port
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            _known[self._place] = _addresses(*self._place)
        except Exception as error:
            self.error = error


# The latest addresses and lookups of each host and port. They have no lock, because a fork could leave it locked.
# Without a lock, at worst a name is looked up twice.
_known: dict[tuple[str, int], list[str]] = {}
_lookups: dict[tuple[str, int], _Lookup] = {}


def _addresses(host: str, port: int, flags: int = 0) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _resolved(host: str, port: int, deadline: float | None) -> list[str]:
    """Return the addresses of a host; if the DNS server does not answer, the addresses from an earlier lookup.

    Raises:
        httpcore.ConnectError: There is no such name, or no DNS server has answered in time.
    """
    with suppress(OSError, UnicodeError):
        return _addresses(host, port, socket.AI_NUMERICHOST)
    known, lookup = _known.get((host, port)), _lookups.get((host, port))
    if lookup is None or not lookup.is_alive():
        lookup = _lookups[host, port] = _Lookup(host, port)
        try:
            lookup.start()
        except RuntimeError as error:
            # Since Python 3.12, exit functions can start no thread.
            lookup.error = error
    if lookup.error is None:
        left_s = _left(deadline, httpcore.ConnectTimeout)
        lookup.join(left_s if known is None or left_s is None else min(left_s / 2, _LATE_LOOKUP_S))
        if lookup.error is None and not lookup.is_alive():
            return _known[host, port]
    if known is not None and getattr(lookup.error, "errno", None) != socket.EAI_NONAME:
        return known
    raise httpcore.ConnectError(
        f"{host} could not be looked up: {lookup.error or 'the DNS server does not answer'}"
    ) from lookup.error


class _Network(httpcore.NetworkBackend):
    """Connects before a deadline; the remaining time is divided among the host's addresses."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        addresses, network = _resolved(host, port, timeout).copy(), httpcore.SyncBackend()
        while True:
            wait_s = _left(timeout, httpcore.ConnectTimeout)
            address = addresses.pop(0)
            try:
                share_s = None if wait_s is None else wait_s / (len(addresses) + 1)
                return _Stream(network.connect_tcp(address, port, share_s, local_address, socket_options), timeout)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if not addresses:
                    raise


class _Stream(httpcore.NetworkStream):
    """A connection whose time-outs are deadlines; calls without a deadline (SOCKS) have the deadline for connecting."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float | None) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(timeout or self._deadline, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(timeout or self._deadline, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left), timeout)

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
