"""The ``bso-server token`` commands. They work on the database: whoever can open it may say who else may."""

from __future__ import annotations

import argparse
import sys

from bso_server.app import prepare
from bso_server.cli.common import TOKEN_VARIABLE, Commands, add_command, with_ready_store, with_store
from bso_server.cli.tables import token_list_json, token_list_text
from bso_server.core.access import Scope
from bso_server.service.security import CACHE_S
from bso_server.service.tokens import Tokens
from bso_server.storage.store import Store


def add_token_commands(commands: Commands) -> None:
    """Add ``token`` with what can be done to them."""
    token = commands.add_parser("token", help="say who may use it").add_subparsers(required=True, metavar="WHAT")

    create = add_command(token, "create", "make a token and print it, this once", _create)
    create.add_argument("--name", required=True, help="what or whom it is for")
    create.add_argument(
        "--scope",
        dest="scopes",
        action="extend",
        nargs="+",
        choices=list(Scope),
        type=Scope,
        help="what it allows: read; report, which includes read (default); admin, which includes all",
    )
    listing = add_command(token, "list", "all tokens, without their secrets", _list)
    listing.add_argument("--json", action="store_true", help="print JSON")
    revoke = add_command(token, "revoke", "make a token worthless for good", _revoke)
    revoke.add_argument("token_id", metavar="ID")


def _create(options: argparse.Namespace) -> None:
    async def create(store: Store) -> None:
        # The first token may come before the server's first start.
        await prepare(store)
        token, record = await Tokens(store).create(options.name, options.scopes or [Scope.REPORT])
        print(token)
        print(
            f"token {record.token_id} ({record.name}): {', '.join(sorted(record.scopes))}. It is shown this once; "
            f"trainings take it from {TOKEN_VARIABLE}. A server of this database asks every client for a token now.",
            file=sys.stderr,
        )

    with_store(options, create)


def _list(options: argparse.Namespace) -> None:
    tokens = with_ready_store(options, lambda store: Tokens(store).all())
    print(token_list_json(tokens) if options.json else token_list_text(tokens))


def _revoke(options: argparse.Namespace) -> None:
    async def revoke(store: Store) -> bool:
        tokens = Tokens(store)
        await tokens.revoke(options.token_id)
        return await tokens.any_valid()

    any_left = with_ready_store(options, revoke)
    print(f"token {options.token_id} is revoked; running servers refuse it within {CACHE_S:g} s")
    if not any_left:
        print(
            "no valid token is left, and servers of this database serve nobody, on this machine neither, until "
            "bso-server token create makes another one",
            file=sys.stderr,
        )
