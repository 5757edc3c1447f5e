"""``zeus-plugins sync``: deliver results that wait because a server was unreachable."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from zeus_plugins import environment
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.delivery import Delivered, deliver_waiting, listed
from zeus_plugins.client.outbox import Outbox, default_outbox
from zeus_plugins.client.port import EMBEDDED, NO_RETRIES, ServerPort
from zeus_plugins.errors import ZeusBSOError
from zeus_plugins.protocol import printable


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``sync``."""
    parser = commands.add_parser(
        "sync",
        help="deliver results that trainings could not while a server was away",
        description="Delivers the results that wait on this machine, each to its own server. A training that still "
        "runs delivers its own results.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the waiting results")
    parser.add_argument(
        "--server-url",
        help="deliver all results to this server instead of their own servers, for example if the server has moved",
    )
    parser.add_argument(
        "--token",
        help="access token (default: environment variable ZEUS_BSO_TOKEN), sent only to the server of --server-url, or "
        "else of ZEUS_SERVER_URL",
    )
    parser.set_defaults(run=_sync)


def _sync(options: argparse.Namespace) -> None:
    outbox = default_outbox()
    files = list(listed(outbox) if options.dry_run else _synced(outbox, options.server_url, options.token))
    for file in files:
        print(printable(file.in_words))
    if not files:
        print(f"nothing waits in {outbox.directory}")
    for path in outbox.refused():
        print(f"{path}: set aside: refused by its server, or not readable in part; delete it if you do not need it")
    if not options.dry_run and any(file.problem is not None or file.set_aside is not None for file in files):
        raise ZeusBSOError("some reports could not be delivered, for the causes above: the next sync tries what waits")


def _synced(outbox: Outbox, server_url: str | None, token: str | None) -> Iterator[Delivered]:
    with ExitStack() as clients:
        opened: dict[str, ServerPort] = {}

        def client_of(belongs_to: str) -> ServerPort:
            url = server_url or belongs_to
            if url not in opened:
                opened[url] = clients.enter_context(_client(url, server_url, token))
            return opened[url]

        yield from deliver_waiting(outbox, client_of)


def _client(url: str, server_url: str | None, token: str | None) -> ServerPort:
    """Return a client for the server, with the token only if the token belongs to that server."""
    client: ServerPort = client_from_environment(url, "")
    owner_url = server_url or environment.SERVER_URL.text()
    owner = client_from_environment(owner_url, token) if owner_url else None
    if owner is not None and owner.server_url == client.server_url:
        return owner.with_retries(NO_RETRIES)
    if (token or environment.access_token()) and not url.startswith(EMBEDDED):
        belonging = f"belongs to {owner.server_url}" if owner is not None else "was given without its server's URL"
        print(
            f"zeus-plugins: {client.server_url} is sent no token, as the token {belonging}; if it is that server's: "
            f"ZEUS_SERVER_URL={client.server_url} zeus-plugins sync",
            file=sys.stderr,
        )
    return client.with_retries(NO_RETRIES)
