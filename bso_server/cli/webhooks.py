"""The ``bso-server webhook`` commands. They need access to the database, which is the right to manage webhooks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

from bso_server.cli.common import CommandError, Commands, add_command, table_of, with_store
from bso_server.service.webhooks import DEFAULT_EVENTS, FORMATS, NotAcceptedError, Webhooks
from bso_server.storage.webhooks import Webhook

_COLUMNS: dict[str, Callable[[Webhook], object]] = {
    "id": lambda webhook: webhook.webhook_id,
    # Without the path, because Slack and Teams accept messages from everyone with the path.
    "host": lambda webhook: urlsplit(webhook.url).hostname,
    "format": lambda webhook: webhook.format,
    "events": lambda webhook: ",".join(webhook.events.split()),
    "created_at": lambda webhook: webhook.created_at,
    "state": lambda webhook: "off" if webhook.next_attempt_at is None else "failing" if webhook.last_error else "ok",
    "failing_since": lambda webhook: webhook.failing_since,
    "last_error": lambda webhook: webhook.last_error,
}


def add_webhook_commands(commands: Commands) -> None:
    """Add ``webhook`` with its subcommands."""
    webhook = commands.add_parser("webhook", help="manage messages to Slack, Teams or a program").add_subparsers(
        required=True, metavar="WHAT"
    )
    add = add_command(webhook, "add", "send messages to a URL; print the secret that signs them, only this once", _add)
    add.add_argument("url", metavar="URL", help="address of the receiver, https:// or http://")
    add.add_argument(
        "--events",
        type=lambda text: text.split(","),
        default=DEFAULT_EVENTS,
        metavar="LIST",
        help=f"kinds of messages (default: {','.join(DEFAULT_EVENTS)}; trial_ended sends one for each run)",
    )
    add.add_argument("--format", choices=FORMATS, default="json", help="format of the messages (default: json)")
    listing = add_command(webhook, "list", "list all webhooks without their secrets and paths", _list)
    listing.add_argument("--json", action="store_true", help="print JSON")
    for name, summary, run in (
        ("remove", "end a webhook", _remove),
        ("test", "send a message now; if it is accepted, switch the webhook on again", _test),
    ):
        add_command(webhook, name, summary, run).add_argument("webhook_id", metavar="ID")


def _add(options: argparse.Namespace) -> None:
    webhook = with_store(options, lambda store: Webhooks(store).add(options.url, options.events, options.format))
    print(webhook.secret)
    print(
        f"webhook {webhook.webhook_id} gets {', '.join(webhook.events.split())}. The secret above signs its messages, "
        f"and is shown this once. To send a message now: bso-server webhook test {webhook.webhook_id}",
        file=sys.stderr,
    )


def _list(options: argparse.Namespace) -> None:
    webhooks = with_store(options, lambda store: Webhooks(store).all())
    if options.json:
        found = [{name: value(each) for name, value in _COLUMNS.items()} for each in webhooks]
        print(json.dumps(found, indent=2, default=lambda instant: instant.isoformat()))
        return
    columns = {name.replace("_", " ").upper(): value for name, value in _COLUMNS.items()}
    print(table_of(columns, webhooks) if webhooks else "no webhooks")


def _remove(options: argparse.Namespace) -> None:
    with_store(options, lambda store: Webhooks(store).remove(options.webhook_id))
    print(f"webhook {options.webhook_id} is removed")


def _test(options: argparse.Namespace) -> None:
    try:
        with_store(options, lambda store: Webhooks(store).test(options.webhook_id))
    except NotAcceptedError as error:
        raise CommandError(f"webhook {options.webhook_id}: {error}") from error
    print(f"webhook {options.webhook_id}: the receiver has accepted the message")
