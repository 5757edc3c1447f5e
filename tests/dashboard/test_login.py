"""Access to the dashboard: a token as the password in a browser, and users that a proxy names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from bso_server.api.auth import with_peer
from bso_server.app import create_app
from bso_server.settings import Settings
from tests.support.dashboard_pages import Page
from tests.support.servers import serving
from tests.support.tokens import make_token

Ask: TypeAlias = "Callable[..., Awaitable[httpx.Response]]"


LINK = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


class TestLogin:
    async def test_browser_is_asked_for_a_token_as_the_password(
        self, new_database: str, new_http: httpx.AsyncClient
    ) -> None:
        token = make_token(new_database, "read")
        unknown = "zbso_01234567_" + "a" * 43
        for auth in (None, ("any", "nonsense"), ("any", unknown)):
            asked = await new_http.get("/ui/jobs/none?x=1", headers={"Sec-Fetch-Site": "cross-site", **LINK}, auth=auth)
            assert asked.status_code == 401
            # Browsers ask only if no other scheme stands before this one.
            assert asked.headers["www-authenticate"].startswith("Basic ")
            assert "enter the token as the password, with any user name" in Page(asked.text).text
            polled = await new_http.get("/ui/jobs.json", auth=auth)
            assert (polled.status_code, polled.headers["www-authenticate"][:6]) == (401, "Basic ")
        for path in ("/ui/", "/ui/jobs.json", "/api/jobs"):
            assert (await new_http.get(path, auth=("any", token))).status_code == 200


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
