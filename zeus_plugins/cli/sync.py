"""``zeus-plugins sync``: deliver what trainings could not while a server was away."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack

from zeus_plugins.client.connect import client_from_environment
from zeus_plugins.client.delivery import Delivered, deliver_waiting, listed
from zeus_plugins.client.outbox import Outbox, default_outbox
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.errors import ZeusBSOError

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``zeus-plugins``."""
    parser = commands.add_parser(
        "sync",
        help="deliver results that trainings could not while a server was away",
        description="Delivers what waits on this machine, each result to the server that it belongs to. Results of "
        "trainings that still run are left to those.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what waits")
    parser.add_argument(
        "--server-url",
        help="deliver everything to this server, in place of those that the results belong to (it has moved, say)",
    )
    parser.add_argument("--token", help="access token (default: environment variable ZEUS_BSO_TOKEN)")
    parser.set_defaults(run=_sync)


def _sync(options: argparse.Namespace) -> None:
    outbox = default_outbox()
    files = list(listed(outbox) if options.dry_run else _synced(outbox, options.server_url, options.token))
    for file in files:
        print(_line(file))
    if not files:
        print(f"nothing waits in {outbox.directory}")
    for path in outbox.refused():
        print(f"{path}: set aside, as its server refused it; delete it when it is of no more use")
    if options.dry_run:
        return
    if any(file.problem is not None and file.set_aside is None for file in files):
        raise ZeusBSOError("not everything could be delivered; run this again when what stands in its way is mended")
    if any(file.set_aside is not None for file in files):
        raise ZeusBSOError("not everything could be delivered: a server refused it for good")


def _synced(outbox: Outbox, server_url: str | None, token: str | None) -> Iterator[Delivered]:
    with ExitStack() as clients:
        opened: dict[str, ServerPort] = {}

        def client_of(belongs_to: str) -> ServerPort:
            url = server_url or belongs_to
            if url not in opened:
                client: ServerPort = client_from_environment(url, token).with_retries(NO_RETRIES)
                opened[url] = clients.enter_context(client)
            return opened[url]

        yield from deliver_waiting(outbox, client_of)


def _line(file: Delivered) -> str:
    what = f"job {file.job_id} for {file.server_url}" if file.server_url else str(file.path)
    counts = ", ".join(
        f"{number} {word}" for number, word in ((file.delivered, "delivered"), (file.left, "waiting")) if number
    )
    if file.set_aside is not None:
        return f"{what}: refused ({file.problem}); set aside as {file.set_aside}"
    return f"{what}: {counts or 'nothing waits'}" + (f" ({file.problem})" if file.problem else "")
