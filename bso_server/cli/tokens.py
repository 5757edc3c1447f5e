"""The ``bso-server token`` commands. They need access to the database, which is the right to manage tokens."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import datetime

from bso_server.cli.common import TOKEN_VARIABLE, Commands, add_command, duration, table_of, with_store
from bso_server.core.access import Scope, TokenRecord
from bso_server.service.tokens import CACHE_S, DEFAULT_GRACE, Tokens
from bso_server.storage.store import Store


def add_token_commands(commands: Commands) -> None:
    """Add ``token`` with its subcommands."""
    token = commands.add_parser("token", help="manage access tokens").add_subparsers(required=True, metavar="WHAT")

    create = add_command(token, "create", "make a token and print it, only this once", _create)
    create.add_argument("--name", required=True, help="purpose or owner of the token")
    create.add_argument(
        "--scope",
        dest="scopes",
        action="extend",
        nargs="+",
        choices=list(Scope),
        type=Scope,
        help="rights of the token: read; report, which includes read (default); admin, which includes all rights",
    )
    create.add_argument(
        "--share",
        action="store_true",
        help="share the jobs of this token: other tokens, such as the tokens of other machines, may run their trials",
    )
    rotate_help = "give a token another secret and print it, only this once; the token keeps its jobs and trials"
    rotate = add_command(token, "rotate", rotate_help, _rotate)
    rotate.add_argument("token_id", metavar="ID")
    rotate.add_argument(
        "--grace",
        type=duration,
        default=DEFAULT_GRACE,
        metavar="TIME",
        help="time for which the old secret stays valid, such as 12h or 7d; 0 for a leaked secret (default 24h)",
    )
    listing = add_command(token, "list", "list all tokens without their secrets", _list)
    listing.add_argument("--json", action="store_true", help="print JSON")
    revoke = add_command(token, "revoke", "make a token invalid for ever", _revoke)
    revoke.add_argument("token_id", metavar="ID")


def _create(options: argparse.Namespace) -> None:
    async def create(store: Store) -> None:
        token, record = await Tokens(store).create(
            options.name, options.scopes or [Scope.REPORT], shares_jobs=options.share
        )
        print(token)
        print(
            f"token {record.token_id} ({record.name}): {', '.join(sorted(record.scopes))}. It is shown this once; "
            f"trainings take it from {TOKEN_VARIABLE}. A server of this database asks every client for a token now.",
            file=sys.stderr,
        )

    # Upgrade the database, because the first token may be created before the first start of the server.
    with_store(options, create, schema="prepared")


def _list(options: argparse.Namespace) -> None:
    found = with_store(options, lambda store: Tokens(store).all())
    if options.json:
        print(json.dumps({"tokens": list(map(_without_secrets, found))}, indent=2, default=datetime.isoformat))
        return
    columns: dict[str, Callable[[TokenRecord], object]] = {
        "ID": lambda token: token.token_id,
        "NAME": lambda token: token.name,
        "SCOPES": lambda token: " ".join(sorted(token.scopes)),
        "SHARES JOBS": lambda token: "yes" if token.shares_jobs else "no",
        "CREATED (UTC)": lambda token: token.created_at,
        "ROTATED (UTC)": lambda token: token.rotated_at,
        "OLD SECRET UNTIL": lambda token: token.previous_until,
        "REVOKED (UTC)": lambda token: token.revoked_at,
    }
    print(table_of(columns, found) if found else "no tokens")


def _without_secrets(token: TokenRecord) -> dict[str, object]:
    shown = ("token_id", "name", "shares_jobs", "created_at", "rotated_at", "revoked_at")
    values = {name: getattr(token, name) for name in shown}
    return values | {"scopes": sorted(token.scopes), "previous_secret_until": token.previous_until}


def _rotate(options: argparse.Namespace) -> None:
    token, record = with_store(options, lambda store: Tokens(store).rotate(options.token_id, options.grace))
    print(token)
    end = f"within {CACHE_S:g} s" if not options.grace else f"from {record.previous_until:%Y-%m-%d %H:%M} UTC on"
    print(
        f"token {record.token_id} ({record.name}) has another secret, which is shown this once; trainings take it from "
        f"{TOKEN_VARIABLE}. Servers refuse the old one {end}. Its jobs and trials stay its own.",
        file=sys.stderr,
    )


def _revoke(options: argparse.Namespace) -> None:
    token_id = options.token_id

    with_store(options, lambda store: Tokens(store).revoke(token_id))
    print(
        f"token {token_id} is revoked; running servers refuse it within {CACHE_S:g} s. Only administrators report on "
        "its trials now; to move its jobs, see docs/tokens.md"
    )
