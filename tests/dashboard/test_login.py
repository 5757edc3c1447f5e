"""Access to the dashboard: the form for a token and the cookie of a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urljoin

import httpx
import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from bso_server.api.auth import with_peer
from bso_server.app import create_app
from bso_server.core.access import Scope
from bso_server.errors import UnauthenticatedError
from bso_server.service.tokens import SESSION_S, Authenticator, Tokens
from bso_server.settings import Settings
from bso_server.storage.transaction import Transaction
from tests.support.dashboard_pages import Page
from tests.support.servers import serving
from tests.support.service import open_store
from tests.support.tokens import bearer, make_token
from tests.support.wire import assert_refused

Ask: TypeAlias = "Callable[..., Awaitable[httpx.Response]]"


class TestLogin:
    async def test_token_opens_pages_only(self, new_database: str, new_http: httpx.AsyncClient) -> None:
        token = make_token(new_database, "admin")
        asked = await new_http.get("/ui/jobs/none?x=1", headers={"Sec-Fetch-Site": "cross-site", **LINK})
        assert asked.status_code == 401
        assert "www-authenticate" not in asked.headers
        assert 'name="to" value="jobs/none?x=1"' in asked.text
        assert "../login" in Page(asked.text).links
        form = {"token": token, "to": "jobs/none?x=1"}
        answer = await new_http.post("/ui/login", data=form, headers={"Origin": "http://localhost:8000"})
        assert (answer.status_code, answer.headers["location"]) == (303, "./jobs/none?x=1")
        cookie = answer.headers["set-cookie"]
        assert "; HttpOnly; SameSite=Lax" in cookie
        assert "Path" not in cookie
        assert "Secure" not in cookie
        assert token not in cookie

        assert (await new_http.get("/ui/")).status_code == 200
        assert "Log out" in (await new_http.get("/ui/")).text
        # httpx obeys the path of the cookie; the server refuses a client that sends the cookie elsewhere.
        shown = {"Cookie": cookie.partition(";")[0]}
        assert_refused(await new_http.get("/api/jobs", headers=shown), 401, None)
        assert (await new_http.post("/ui/logout")).status_code == 303
        assert (await new_http.get("/ui/")).status_code == 401
        assert (await new_http.get("/ui/", headers=bearer(token))).status_code == 200

    async def test_logout_ends_copies_of_cookie_but_no_second_session(
        self, new_database: str, new_http: httpx.AsyncClient
    ) -> None:
        token = make_token(new_database, "read")
        copied, other = [
            (await new_http.post("/ui/login", data={"token": token})).headers["set-cookie"].partition(";")[0]
            for _ in range(2)
        ]
        new_http.cookies.clear()
        assert (await new_http.get("/ui/", headers={"Cookie": copied})).status_code == 200
        for _ in range(2):
            assert (await new_http.post("/ui/logout", headers={"Cookie": copied})).status_code == 303
        assert (await new_http.get("/ui/", headers={"Cookie": copied})).status_code == 401
        assert (await new_http.get("/ui/jobs.json", headers={"Cookie": copied})).status_code == 401
        assert (await new_http.get("/ui/", headers={"Cookie": other})).status_code == 200
        for none in ("", "zeus_bso_session=", "zeus_bso_session=x", f"{copied}0"):
            assert (await new_http.post("/ui/logout", headers={"Cookie": none})).status_code == 303

    async def test_cookie_is_secure_behind_https(self, new_database: str, new_http: httpx.AsyncClient) -> None:
        token = make_token(new_database, "read")
        answer = await new_http.post("/ui/login", data={"token": token}, headers={"X-Forwarded-Proto": "https"})
        assert answer.headers["set-cookie"].endswith("; Secure")

    @pytest.mark.parametrize("to", ["//evil.example", "https://evil.example", "a\r\nSet-Cookie: b", "a b", "\\evil"])
    async def test_login_redirects_to_own_site_only(
        self, new_database: str, new_http: httpx.AsyncClient, to: str
    ) -> None:
        token = make_token(new_database, "read")
        answer = await new_http.post("/ui/login", data={"token": token, "to": to})
        assert urljoin("http://localhost/p/ui/login", answer.headers["location"]).startswith("http://localhost/p/ui/")

    async def test_forms_sent_from_foreign_pages_are_refused(
        self, new_database: str, new_http: httpx.AsyncClient
    ) -> None:
        token = make_token(new_database, "read")
        for path in ("/ui/login", "/ui/logout"):
            for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                answer = await new_http.post(path, data={"token": token}, headers=headers)
                assert answer.status_code == 403
                assert "set-cookie" not in answer.headers

    async def test_login_form_has_an_address_of_its_own(self, new_database: str, new_http: httpx.AsyncClient) -> None:
        token = make_token(new_database, "read")
        form = await new_http.get("/ui/login")
        assert (form.status_code, "This server needs a token" in form.text) == (200, True)
        answer = await new_http.post("/ui/login", data={"token": token}, headers={"Origin": "http://localhost:8000"})
        assert answer.status_code == 303
        again = await new_http.get("/ui/login")
        assert (again.status_code, again.headers["location"]) == (303, "./")

    async def test_wrong_token_is_asked_for_again(self, new_database: str, new_http: httpx.AsyncClient) -> None:
        make_token(new_database, "read")
        for token in ("", "nonsense", "zbso_01234567_" + "a" * 43):
            answer = await new_http.post("/ui/login", data={"token": token, "to": "jobs/a"})
            assert answer.status_code == 401
            assert "set-cookie" not in answer.headers
            assert 'role="alert"' in answer.text
            assert 'value="jobs/a"' in answer.text


LINK = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


async def test_session_ends_with_time_token_or_secret(new_database: str) -> None:
    async with open_store(new_database) as store:
        tokens, now, clock = Tokens(store), [datetime(2026, 1, 1, tzinfo=UTC)], [0.0]
        authenticator = Authenticator(tokens, clock=lambda: clock[0], now=lambda: now[0])

        async def is_good(session: str) -> bool:
            clock[0] += 100  # So the authenticator remembers no answer.
            try:
                caller = await authenticator.identify(None, "127.0.0.1", "localhost", session)
            except Exception:
                return False
            assert (caller.token_id, caller.scopes) == (record.token_id, {Scope.READ})
            return True

        token, record = await tokens.create("somebody", [Scope.ADMIN])
        session = await authenticator.begin_session(token)
        assert await is_good(session)
        now[0] += timedelta(seconds=SESSION_S - 1)
        assert await is_good(session)
        now[0] += timedelta(seconds=1)
        assert not await is_good(session)

        session = await authenticator.begin_session(token)
        token_id, ends_at, session_id, signature = session.split(".")
        for forged in (
            f"{token_id}.{int(ends_at) - 1}.{session_id}.{signature}",
            f"{token_id}.{ends_at}.{session_id}.{signature[:-1]}{'0' if signature[-1] != '0' else '1'}",
            f"{token_id}.{ends_at}.{'0' * 32}.{signature}",
            f"00000000.{ends_at}.{session_id}.{signature}",
            token,
            "",
        ):
            assert not await is_good(forged)
        assert await is_good(session)
        token, _ = await tokens.rotate(record.token_id)
        assert not await is_good(session)
        session = await authenticator.begin_session(token)
        assert await is_good(session)
        await tokens.revoke(record.token_id)
        assert not await is_good(session)


@pytest.mark.storage
async def test_session_ends_in_every_process_and_expired_session_is_deleted(database_url: str) -> None:
    async with open_store(database_url) as store:
        now = [datetime(2026, 1, 1, tzinfo=UTC)]
        tokens = Tokens(store, clock=lambda: now[0])
        one, other = (Authenticator(tokens, now=lambda: now[0]) for _ in range(2))
        token, record = await tokens.create("reader", [Scope.READ])
        first, second = await one.begin_session(token), await one.begin_session(token)
        assert (await other.identify(None, None, "localhost", first)).token_id == record.token_id
        await asyncio.gather(*(each.end_session(first) for each in (one, other) for _ in range(8)))
        for authenticator in (one, other):
            with pytest.raises(UnauthenticatedError):
                await authenticator.identify(None, None, "localhost", first)
            assert (await authenticator.identify(None, None, "localhost", second)).token_id == record.token_id

        now[0] += timedelta(seconds=SESSION_S)
        await other.end_session(await one.begin_session(token))
        assert not await store.read(Transaction.is_ended_session, first.split(".")[2])


class TestSingleSignOn:
    """Users that an authenticating proxy names."""

    @pytest.fixture
    async def ask(self, new_database: str) -> AsyncIterator[Ask]:
        """Send a request from an address through the layers that `bso-server serve` puts around the application."""
        settings = Settings(
            database_url=new_database,
            sso_proxies="10.0.0.5, 10.1.0.0/16,fd00::/8",
            _env_file=None,
        )
        make_token(new_database, "read")
        app = create_app(settings)
        around = with_peer(ProxyHeadersMiddleware(app, "*"))

        async def ask(address: str, path: str = "/ui/", method: str = "GET", **request: Any) -> httpx.Response:
            transport = httpx.ASGITransport(around, client=(address, 5000))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
                return await http.request(method, path, **request)

        async with app.lifespan():
            yield ask

    @pytest.mark.parametrize("address", ["10.0.0.5", "10.1.2.3", "::ffff:10.0.0.5", "fd00::1"])
    async def test_user_of_stated_proxy_reads_pages_only(self, ask: Ask, address: str) -> None:
        headers = {"X-Forwarded-User": "bob@example.com", "X-Forwarded-For": "192.0.2.7"}
        assert (await ask(address, headers=headers)).status_code == 200
        assert (await ask(address, "/ui/jobs.json", headers=headers)).status_code == 200
        assert (await ask(address, "/api/jobs", headers=headers)).status_code == 401
        assert (await ask(address, "/jobs", "POST", headers=headers, json={})).status_code == 401

    @pytest.mark.parametrize(
        ("address", "headers"),
        [
            ("10.0.0.6", [("X-Forwarded-User", "ada@example.com")]),
            ("127.0.0.1", [("X-Forwarded-User", "ada@example.com")]),
            # The launcher trusts these addresses and would take the client for a proxy.
            ("192.0.2.7", [("X-Forwarded-User", "ada@example.com"), ("X-Forwarded-For", "10.0.0.5")]),
            ("192.0.2.7", [("X-Forwarded-User", "ada@example.com"), ("X-Forwarded-For", "10.0.0.5:5000")]),
            # This is not the stated header, so the proxy may have let it through.
            ("10.0.0.5", [("Remote-User", "ada@example.com")]),
            ("10.0.0.5", [("X-Forwarded-User", "ada@example.com"), ("X-Forwarded-User", "bob@example.com")]),
            ("10.0.0.5", [("X-Forwarded-User", "")]),
            ("10.0.0.5", []),
        ],
    )
    async def test_request_from_unstated_proxy_is_no_user(
        self, ask: Ask, address: str, headers: list[tuple[str, str | bytes]]
    ) -> None:
        assert (await ask(address, headers=headers)).status_code == 401

    async def test_sign_on_is_off_without_stated_proxies(self, new_database: str) -> None:
        make_token(new_database, "read")
        app = create_app(Settings(database_url=new_database, _env_file=None))
        transport = httpx.ASGITransport(with_peer(app), client=("127.0.0.1", 5000))
        async with app.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/ui/", headers={"X-Forwarded-User": "ada"})).status_code == 401

    def test_command_serves_user_of_stated_proxy(
        self, new_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_token(new_database, "read")
        monkeypatch.setenv("ZEUS_BSO_SSO_PROXIES", "127.0.0.1")
        monkeypatch.setenv("ZEUS_BSO_SSO_HEADER", "Remote-User")
        with serving(new_database, tmp_path) as server:
            headers = {"Remote-User": "bob", "X-Forwarded-For": "192.0.2.7"}
            assert httpx.get(f"{server.url}/ui/", headers=headers).status_code == 200
            assert httpx.get(f"{server.url}/ui/", headers={"X-Forwarded-User": "bob"}).status_code == 401
            assert httpx.get(f"{server.url}/api/jobs", headers=headers).status_code == 401
            # The log names the client instead of the proxy.
            assert "GET '/api/jobs' from 192.0.2.7, no token" in server.log.read_text()
