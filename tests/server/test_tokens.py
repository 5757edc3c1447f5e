"""Tokens: creation, authentication, storage, and the time for which they are cached."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from bso_server.core.access import UNRESTRICTED, Scope, TokenRecord
from bso_server.errors import (
    ForbiddenError,
    UnauthenticatedError,
    UntrustedHostError,
)
from bso_server.service.tokens import (
    CACHE_S,
    Authenticator,
    Tokens,
    is_loopback,
    new_secret,
    new_token,
    refuse_other_origins,
    require_allowed_host,
    token_in,
)
from bso_server.storage.store import Store
from tests.support.servers import bso_server

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TOKEN, RECORD = new_token("a training", {Scope.REPORT}, NOW)
REVOKED = replace(RECORD, revoked_at=NOW)
LOCAL, FOREIGN = "127.0.0.1", "203.0.113.9"


def basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


class Clock:
    """A clock that advances on request."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Book(Tokens):
    """Tokens in memory, with a count of lookups."""

    def __init__(self, *records: TokenRecord) -> None:
        self.records = {record.token_id: record for record in records}
        self.looks = 0

    async def find(self, token_id: str) -> TokenRecord | None:
        self.looks += 1
        return self.records.get(token_id)

    async def any(self, *, valid: bool = False) -> bool:
        assert not valid
        self.looks += 1
        return bool(self.records)

    def lose(self, token_id: str) -> None:
        self.records[token_id] = replace(self.records[token_id], revoked_at=NOW)


class TestMaking:
    def test_token_contains_the_id_and_256_random_bits(self) -> None:
        token, record = new_token("a training", {Scope.READ}, NOW)

        assert re.fullmatch(rf"zbso_{record.token_id}_[A-Za-z0-9_-]{{43}}", token)
        assert re.fullmatch("[0-9a-f]{8}", record.token_id)
        assert new_token("a training", {Scope.READ}, NOW)[0] != token

    def test_record_does_not_contain_the_secret(self) -> None:
        secret = TOKEN.split("_", 2)[2]
        assert secret not in repr(RECORD)
        assert len(RECORD.token_hash) == 64


WRONG_HEADERS = {
    "nothing": "",
    "no token": "Bearer",
    "no scheme": TOKEN,
    "another scheme": f"Digest {TOKEN}",
    "too short": f"Bearer {TOKEN[:-1]}",
    "too long": f"Bearer {TOKEN}x",
    "two lines": f"Bearer {TOKEN}\n{TOKEN}",
    "no secret": "Bearer zbso_0123abcd_",
    "Basic without a token": basic("me:"),
    "Basic without a colon": basic(TOKEN),
    "as the name": basic(f"{TOKEN}:me"),
    "no Base64": "Basic %",
    "no text": "Basic /w==",
    "no ASCII": "Basic é",
}


class TestReadingHeaders:
    @pytest.mark.parametrize(
        "header",
        [f"Bearer {TOKEN}", f"bearer  {TOKEN} ", basic(f"me:{TOKEN}"), basic(f":{TOKEN}")],
        ids=["Bearer", "with blanks", "Basic", "Basic without a name"],
    )
    def test_token_is_found_in_the_header(self, header: str) -> None:
        assert token_in(header) == TOKEN

    # The tokens are random, whereas the names of tests must be constant.
    @pytest.mark.parametrize("header", WRONG_HEADERS.values(), ids=WRONG_HEADERS)
    def test_invalid_header_is_refused_without_quoting_the_token(self, header: str) -> None:
        with pytest.raises(UnauthenticatedError) as caught:
            token_in(header)
        assert TOKEN[:-1] not in str(caught.value)


LOOPBACK = ("127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1")
NO_LOOPBACK = ("::ffff:203.0.113.9", "203.0.113.9", "128.0.0.1", "0.0.0.0", "localhost", "", None)  # noqa: S104


@pytest.mark.parametrize("address", [*LOOPBACK, *NO_LOOPBACK])
def test_loopback_addresses_are_recognized(address: str | None) -> None:
    assert is_loopback(address) == (address in LOOPBACK)


@pytest.mark.parametrize(
    "host", ["bso.example", "BSO.example:8000", "bso.example:", "a.corp.example", "a.b.corp.example:1", "[::1]:8000"]
)
def test_allowed_hosts_are_accepted(host: str) -> None:
    require_allowed_host(host, ["Bso.example", "*.corp.example", "[::1]"])
    require_allowed_host(host, ["*"])


@pytest.mark.parametrize(
    "host", ["", "evil.example", "bso.example.evil", "corp.example", "xcorp.example", "bso!example"]
)
def test_hosts_outside_the_allowed_list_are_refused(host: str) -> None:
    with pytest.raises(UntrustedHostError, match="ZEUS_BSO_ALLOWED_HOSTS"):
        require_allowed_host(host, ["bso.example", "*.corp.example"])


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("", "bso.example"),
        ("http://bso.example", "bso.example"),
        ("http://BSO.example:8000", "bso.example:8000"),
        ("https://bso.example", "bso.example:443"),
        ("http://bso.example:80", "bso.example"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("https://board.example", "bso.example"),
        ("http://board.example:3000", "bso.example"),
        ("https://a.corp.example", "bso.example"),
    ],
)
def test_origins_of_the_server_or_allowed_hosts_may_change_data(origin: str, host: str) -> None:
    refuse_other_origins(origin, host, ["*", "board.example", "*.corp.example"])


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "http://evil.example", "http://localhost:3000", "http://localhost"),
        *("https://localhost:8000.evil.example", "http://", "://", "localhost:8000", "file://"),
    ],
)
def test_foreign_origins_may_not_change_data(origin: str) -> None:
    with pytest.raises(ForbiddenError, match="ZEUS_BSO_ALLOWED_HOSTS"):
        refuse_other_origins(origin, "localhost:8000", ["*"])


class TestAuthenticating:
    """With tokens in memory and a clock set by the test."""

    async def identify(
        self, authenticator: Authenticator, authorization: str | None, address: str = FOREIGN, host: str = "localhost"
    ) -> str | type[Exception] | None:
        """Return the caller's token id, or the type of the refusal."""
        try:
            return (await authenticator.identify(authorization, address, host)).token_id
        except (ForbiddenError, UnauthenticatedError, UntrustedHostError) as error:
            return type(error)

    async def test_callers_are_served_or_refused_by_tokens_address_and_insecure_mode(self) -> None:
        for records, token, address, served, served_insecurely in (
            ([], None, LOCAL, None, None),
            ([], None, FOREIGN, ForbiddenError, None),
            ([], TOKEN, LOCAL, UnauthenticatedError, UnauthenticatedError),
            ([RECORD], None, LOCAL, UnauthenticatedError, None),
            ([RECORD], None, FOREIGN, UnauthenticatedError, None),
            ([RECORD], TOKEN, FOREIGN, RECORD.token_id, RECORD.token_id),
            ([REVOKED], None, LOCAL, UnauthenticatedError, None),
            ([REVOKED], None, FOREIGN, UnauthenticatedError, None),
            ([REVOKED], TOKEN, LOCAL, UnauthenticatedError, UnauthenticatedError),
        ):
            for insecure, expected in ((False, served), (True, served_insecurely)):
                authenticator = Authenticator(Book(*records), insecure=insecure)
                assert await self.identify(authenticator, token and f"Bearer {token}", address) == expected
        assert await Authenticator(Book()).identify(None, LOCAL, "localhost") == UNRESTRICTED

    @pytest.mark.parametrize(
        "host",
        ["localhost", "LOCALHOST:8000", "bso.localhost", "127.0.0.1:80", "127.1.2.3", "[::1]:8000", "[::1]", "box:1"],
    )
    async def test_without_tokens_local_and_allowed_host_names_are_served(self, host: str) -> None:
        assert await self.identify(Authenticator(Book(), allowed_hosts=["*", "box"]), None, LOCAL, host) is None

    @pytest.mark.parametrize(
        "host",
        [
            "",
            "evil.example",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[::2]:1",
        ],
    )
    async def test_without_tokens_foreign_host_names_are_refused(self, host: str) -> None:
        authenticator = Authenticator(Book(), allowed_hosts=["*", "box"])
        assert await self.identify(authenticator, None, LOCAL, host) is UntrustedHostError
        assert await self.identify(Authenticator(Book(RECORD)), f"Bearer {TOKEN}", LOCAL, host) == RECORD.token_id
        assert await self.identify(Authenticator(Book(), insecure=True), None, LOCAL, host) is None

    async def test_token_id_without_the_secret_is_refused(self) -> None:
        authenticator = Authenticator(Book(RECORD))
        forged = f"Bearer zbso_{RECORD.token_id}_{'x' * 43}"
        assert await self.identify(authenticator, forged) is UnauthenticatedError
        assert await self.identify(authenticator, f"Bearer {TOKEN}") == RECORD.token_id
        assert await self.identify(authenticator, forged) is UnauthenticatedError

    @pytest.mark.parametrize("known", [[RECORD], []], ids=["a known token", "an open server"])
    async def test_known_caller_is_not_looked_up_again(self, known: list[TokenRecord]) -> None:
        book, clock = Book(*known), Clock()
        authenticator = Authenticator(book, clock=clock)
        for _ in range(3):
            caller = await self.identify(authenticator, f"Bearer {TOKEN}" if known else None, LOCAL)
            assert caller == (RECORD.token_id if known else None)
            clock.now_s += CACHE_S / 4
        assert book.looks == 1

    async def test_revocation_takes_effect_when_the_cache_expires(self) -> None:
        book, clock = Book(RECORD), Clock()
        authenticator = Authenticator(book, clock=clock)
        await self.identify(authenticator, f"Bearer {TOKEN}")
        book.lose(RECORD.token_id)

        clock.now_s += CACHE_S - 0.001
        assert await self.identify(authenticator, f"Bearer {TOKEN}") == RECORD.token_id
        clock.now_s += 0.001
        assert await self.identify(authenticator, f"Bearer {TOKEN}") is UnauthenticatedError
        assert await self.identify(authenticator, None, LOCAL) is UnauthenticatedError

    async def test_new_secret_works_at_once_and_the_old_secret_until_expiry(self) -> None:
        book, clock = Book(RECORD), Clock()
        instants = [NOW]
        authenticator = Authenticator(book, clock=clock, now=lambda: instants[-1])
        assert await self.identify(authenticator, f"Bearer {TOKEN}") == RECORD.token_id
        new, new_hash = new_secret(RECORD.token_id)
        book.records[RECORD.token_id] = RECORD.rotated(new_hash, NOW, NOW + timedelta(hours=1))

        for _ in range(2):
            assert await self.identify(authenticator, f"Bearer {new}") == RECORD.token_id
            assert await self.identify(authenticator, f"Bearer {TOKEN}") == RECORD.token_id
        assert book.looks == 2
        instants.append(NOW + timedelta(hours=1))
        assert await self.identify(authenticator, f"Bearer {TOKEN}") is UnauthenticatedError
        assert await self.identify(authenticator, f"Bearer {new}") == RECORD.token_id
        book.lose(RECORD.token_id)
        instants.append(NOW)
        clock.now_s += CACHE_S
        assert await self.identify(authenticator, f"Bearer {TOKEN}") is UnauthenticatedError
        assert await self.identify(authenticator, f"Bearer {new}") is UnauthenticatedError

    def test_repeated_rotation_keeps_the_old_secret(self) -> None:
        once = RECORD.rotated("new", NOW, NOW + timedelta(hours=1))
        assert once.previous_hash == RECORD.token_hash
        assert once.rotated("new", NOW + timedelta(seconds=1), NOW + timedelta(hours=2)) == once

    async def test_new_token_works_at_once_and_closes_the_server(self) -> None:
        book = Book()
        authenticator = Authenticator(book, clock=Clock())
        assert await self.identify(authenticator, f"Bearer {TOKEN}") is UnauthenticatedError
        assert await self.identify(authenticator, None, LOCAL) is None

        book.records[RECORD.token_id] = RECORD
        assert await self.identify(authenticator, f"Bearer {TOKEN}") == RECORD.token_id
        assert await self.identify(authenticator, None, LOCAL) is UnauthenticatedError

    async def test_unknown_tokens_are_not_cached(self) -> None:
        authenticator = Authenticator(Book(RECORD))
        for number in range(100):
            await self.identify(authenticator, f"Bearer zbso_{number:08x}_{'x' * 43}")
        assert len(authenticator._known._values) == 0

    async def test_cache_of_known_tokens_is_bounded(self) -> None:
        made = [new_token(f"training {number}", {Scope.READ}, NOW) for number in range(1030)]
        authenticator = Authenticator(Book(*(record for _, record in made)))
        for token, _ in made:
            await authenticator.identify(f"Bearer {token}", FOREIGN, "")
        assert len(authenticator._known._values) == 1024


@pytest.fixture
def tokens(store: Store) -> Tokens:
    """The tokens of a database of each kind, with a clock that advances by a second at each reading."""
    ticks = count()
    return Tokens(store, clock=lambda: NOW + timedelta(seconds=next(ticks)))


class TestKeeping:
    """Storage in each kind of database."""

    async def test_stored_token_is_found_until_revoked(self, tokens: Tokens) -> None:
        token, record = await tokens.create("é ✓", [Scope.READ, Scope.REPORT])
        assert await tokens.find(record.token_id) == record
        assert record in await tokens.all()
        assert await tokens.any()
        assert await tokens.find("00000000") is None
        assert token_in(f"Bearer {token}") == token
        await tokens.revoke(record.token_id)
        assert (await tokens.find(record.token_id) or record).revoked_at is not None
        assert await tokens.any()

    async def test_revoked_token_is_refused(self, tokens: Tokens) -> None:
        clock = Clock()
        authenticator = Authenticator(tokens, clock=clock)
        _, other = await tokens.create("stays", [Scope.ADMIN])
        token, record = await tokens.create("goes", [Scope.ADMIN])
        assert (await authenticator.identify(f"Bearer {token}", FOREIGN, "")).token_id == record.token_id

        await tokens.revoke(record.token_id)
        revoked = await tokens.find(record.token_id)
        await tokens.revoke(record.token_id)
        clock.now_s += CACHE_S
        with pytest.raises(UnauthenticatedError, match="revoked"):
            await authenticator.identify(f"Bearer {token}", FOREIGN, "")
        assert revoked == replace(record, revoked_at=record.created_at + timedelta(seconds=1))
        assert await tokens.find(record.token_id) == revoked
        assert await tokens.find(other.token_id) == other
        with pytest.raises(ValueError, match="'00000000'"):
            await tokens.revoke("00000000")

    async def test_rotated_token_has_two_valid_secrets(self, tokens: Tokens) -> None:
        old, record = await tokens.create("turns", [Scope.REPORT], shares_jobs=True)
        new, rotated = await tokens.rotate(record.token_id, timedelta(hours=1))
        now = record.created_at + timedelta(seconds=1)
        assert new != old
        assert rotated == replace(
            record,
            token_hash=rotated.token_hash,
            rotated_at=now,
            previous_hash=record.token_hash,
            previous_until=now + timedelta(hours=1),
        )
        assert await tokens.find(record.token_id) == rotated
        assert rotated.caller() == record.caller()
        newest, _ = await tokens.rotate(record.token_id)
        authenticator = Authenticator(tokens, now=lambda: now)
        for token in (new, newest):
            assert (await authenticator.identify(f"Bearer {token}", FOREIGN, "bso.example")).shares_jobs
        with pytest.raises(UnauthenticatedError):
            await authenticator.identify(f"Bearer {old}", FOREIGN, "bso.example")

    async def test_revoked_token_cannot_be_rotated_(self, tokens: Tokens) -> None:
        _, gone = await tokens.create("gone", [Scope.REPORT])
        await tokens.revoke(gone.token_id)
        with pytest.raises(ValueError, match=f"{gone.token_id} was revoked, which is for good"):
            await tokens.rotate(gone.token_id)
        for unknown in (tokens.rotate("ffffffff"), tokens.revoke("ffffffff")):
            with pytest.raises(ValueError, match="'ffffffff'"):
                await unknown

    async def test_name_of_a_token_must_be_printable(self, tokens: Tokens) -> None:
        for name in ("", " ", "x" * 256, "two\nlines"):
            with pytest.raises(ValueError, match="printable"):
                await tokens.create(name, [Scope.READ])


class TestCommands:
    def test_token_is_printed_once_without_further_text(self, database_url: str) -> None:
        source = ["--database-url", database_url]
        bso_server("db", "upgrade", *source)
        created = bso_server("token", "create", "--name", "nightly", "--scope", "read", "report", *source)
        listed = bso_server("token", "list", "--json", *source)

        assert created.returncode == 0, created.stderr
        token = created.stdout.removesuffix("\n")
        assert token_in(f"Bearer {token}") == token
        assert token not in created.stderr
        (shown,) = [one for one in json.loads(listed.stdout)["tokens"] if one["name"] == "nightly"]
        assert shown["token_id"] == token.split("_")[1]
        assert shown["scopes"] == ["read", "report"]
        assert shown["revoked_at"] is None
        assert shown["shares_jobs"] is False
        assert (shown["rotated_at"], shown["previous_secret_until"]) == (None, None)
        assert token.split("_", 2)[2] not in listed.stdout
        assert len(shown) == 8

        assert bso_server("token", "revoke", shown["token_id"], *source).returncode == 0
        listed = bso_server("token", "list", "--json", *source)
        (shown,) = [one for one in json.loads(listed.stdout)["tokens"] if one["name"] == "nightly"]
        assert shown["revoked_at"] is not None

    def test_list_of_tokens_is_a_sentence_or_a_table(self, new_database: str) -> None:
        source = ["--database-url", new_database]
        bso_server("db", "upgrade", *source)
        assert bso_server("token", "list", *source).stdout == "no tokens\n"
        answer = bso_server("token", "revoke", "00000000", *source)
        assert answer.returncode == 1
        assert answer.stderr == "bso-server: unknown token '00000000': bso-server token list shows the ids\n"
        assert bso_server("token", "create", "--name", "first", *source).returncode == 0
        assert bso_server("token", "list", *source).stdout.splitlines()[1].split()[1:3] == ["first", "report"]
