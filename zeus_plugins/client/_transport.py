"""The network layer of `http.py`: one deadline for a whole exchange, and no proxy for servers on this machine.

The time-outs of httpx limit each single wait, and nothing limits the lookup of a name. A server that sends a byte now
and then, or a DNS server that does not answer, could delay a request forever.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from urllib.request import getproxies

import httpx

from zeus_plugins.environment import CERTIFICATE_DIRECTORY, CERTIFICATES
from zeus_plugins.errors import ZeusBSOServerUnreachableError


def received_within(limit_s: float, receive: Callable[[], httpx.Response]) -> httpx.Response:
    """Call `receive` in a thread that is abandoned after `limit_s`, and return its answer or raise its error.

    Exit functions can start no thread since Python 3.12: in them, only the time-outs of httpx limit the call.

    Raises:
        TimeoutError: There is no answer after `limit_s`. The thread may still wait for it.
    """
    if limit_s <= 0:
        raise TimeoutError
    answer: Future[httpx.Response] = Future()
    thread = threading.Thread(target=_answer, args=(answer, receive), name="zeus-bso-request", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return receive()
    try:
        return answer.result(limit_s)
    finally:
        del answer  # the error refers to this frame


def _answer(answer: Future[httpx.Response], receive: Callable[[], httpx.Response]) -> None:
    try:
        answer.set_result(receive())
    except BaseException as error:
        answer.set_exception(error)
    finally:
        del answer, receive  # the error refers to this frame: its connection is closed without the garbage collector


def connections_to(server_url: str, **options: Any) -> httpx.Client:
    """Return a client with these options for one server, through the environment's proxy.

    Raises:
        ZeusBSOServerUnreachableError: The environment names a proxy or certificates that cannot be used.
    """
    url = httpx.URL(server_url)
    # No proxy for this machine, because it would see the token.
    direct = {f"all://{url.netloc.decode('ascii')}": None} if _is_this_machine(url.host) else None
    try:
        if not all(httpx.URL(each).host for each in getproxies().values() if "//" in each):
            raise ValueError("a proxy has no host")
        # Certificates of authorities take long to load. Connections stay open until the next heartbeat.
        limits = httpx.Limits(keepalive_expiry=None)
        return httpx.Client(verify=url.scheme == "https", limits=limits, mounts=direct, **options)
    except OSError as error:
        name = next((each for each in (CERTIFICATES, CERTIFICATE_DIRECTORY) if each.text()), CERTIFICATES)
        raise ZeusBSOServerUnreachableError(
            f"no connection to {url.host}: the certificates in {name.text()}, which {name} names, cannot be read: "
            f"{error}. Correct or unset the variable"
        ) from None
    except (ValueError, httpx.InvalidURL, ImportError):  # no package for SOCKS
        # Do not chain the error: it may quote a password in the proxy's URL.
        raise ZeusBSOServerUnreachableError(
            f"no connection to {url.host}: the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used. "
            "Correct the variable (socks5:// needs: pip install 'httpx[socks]'), or add the host to NO_PROXY"
        ) from None


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
