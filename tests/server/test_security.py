"""Access: real servers on each kind of database, and applications with requests from other machines."""

from __future__ import annotations

import base64
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar, get, post
from litestar.routes import HTTPRoute

from bso_server.api.auth import PAGE, AccessControl, needed_scope, needs
from bso_server.api.errors import EXCEPTION_HANDLERS
from bso_server.app import create_app
from bso_server.core.access import Scope
from bso_server.errors import ForbiddenError
from bso_server.service import tokens as service
from bso_server.service.tokens import Authenticator
from bso_server.settings import Settings
from tests.support.dashboard_pages import client_of
from tests.support.job_bench import seconds_and_joules
from tests.support.jobs import THREE_SIZES, job
from tests.support.reporting import warnings_in
from tests.support.servers import ServerProcess, bso_server, serving
from tests.support.service import JobService, trial_id
from tests.support.tokens import RESULT, Http, Tokens, bearer, make_token
from tests.support.wire import assert_refused, begin
from zeus_plugins import JobSpec
from zeus_plugins.cli import main
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import default_outbox
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOTokenError
from zeus_plugins.protocol import CreatedJob, Heartbeat, TrialState, TrialView
from zeus_plugins.training.session import TrialSession

LOCAL, FOREIGN = "127.0.0.1", "203.0.113.9"
UNKNOWN = f"zbso_00000000_{'x' * 43}"


@pytest.fixture(scope="module")
def any_server(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of this file only, because the first token closes a server to callers without a token."""
    with serving(database_url, tmp_path_factory.mktemp("server"), "--migrate") as server:
        yield server


@pytest.fixture(scope="module")
def tokens(any_server: ServerProcess) -> Tokens:
    scopes = {"read": "read", "report": "report", "other": "report", "admin": "admin"}
    return Tokens(**{name: make_token(any_server.database_url, scope) for name, scope in scopes.items()})


@pytest.fixture(scope="module")
def sharing(any_server: ServerProcess) -> str:
    """Return a token that shares its jobs with other tokens."""
    return make_token(any_server.database_url, "report", options=["--share"])


@pytest.fixture
def http(any_server: ServerProcess) -> Http:
    return Http(any_server.url)


class TestTokens:
    def test_without_a_token_only_open_routes_answer(self, http: Http, tokens: Tokens) -> None:
        # Sent once, so that the server has certainly noticed its tokens.
        assert http.ask("GET", "/api/jobs", tokens.read).status_code == 200

        refused = httpx.get(f"{http.url}/api/jobs")
        assert_refused(refused, 401, None, "bso-server token create", "ZEUS_BSO_TOKEN")
        assert refused.headers["WWW-Authenticate"].startswith("Bearer ")
        assert_refused(httpx.post(f"{http.url}/jobs", content="{"), 401, None)
        for path in ("/health/live", "/health/ready", "/version"):
            assert httpx.get(http.url + path).status_code == 200

    def test_training_needs_only_the_token(self, http: Http, tokens: Tokens) -> None:
        with BsoClient(http.url, token=tokens.report) as client:
            assert client.list_jobs() is not None
        with BsoClient(http.url.replace("//", f"//zeus:{tokens.report}@")) as client:
            assert client.list_jobs() is not None
        with BsoClient(http.url, token=UNKNOWN) as client, pytest.raises(ZeusBSOConfigError, match="token"):
            client.list_jobs()

    @pytest.mark.parametrize(
        ("method", "path", "needed"),
        [
            ("GET", "/api/jobs/none", {"read", "report", "admin"}),
            ("GET", "/schema/openapi.json", {"read", "report", "admin"}),
            ("POST", "/jobs", {"report", "admin"}),
            ("GET", "/jobs/batch_size?job_id=none", {"report", "admin"}),
            ("POST", "/report", {"report", "admin"}),
            ("DELETE", "/jobs?job_id=none", {"admin"}),
        ],
    )
    def test_scopes_permit_the_documented_requests(
        self, http: Http, tokens: Tokens, method: str, path: str, needed: set[str]
    ) -> None:
        for scope in ("read", "report", "admin"):
            answer = http.ask(method, path, getattr(tokens, scope))
            if scope in needed:
                assert answer.status_code not in {401, 403}, answer.text
            else:
                assert_refused(answer, 403, None, "has no scope")


def test_route_without_a_declared_scope_is_protected() -> None:
    async def forgotten() -> None: ...

    assert needed_scope(get("/forgotten")(forgotten)) == "read"
    assert needed_scope(post("/forgotten")(forgotten)) == "admin"


def test_each_route_requires_the_documented_scope(new_database: str) -> None:
    app = create_app(Settings(database_url=new_database))
    needed: dict[str | None, set[str]] = {None: set(), "report": set(), "read": set(), "admin": set()}
    for route in app.routes:
        assert isinstance(route, HTTPRoute)
        for handler in route.route_handlers:
            for method in handler.http_methods - {"HEAD", "OPTIONS"}:
                needed[needed_scope(handler)].add(f"{method} {route.path}")

    pages = {"GET /", "GET /ui/static/{name:str}"}
    assert needed[None] == {"GET /health/live", "GET /health/ready", "GET /version", *pages}
    assert needed["report"] == {
        "POST /jobs",
        "GET /jobs/batch_size",
        "POST /report",
        "POST /trials",
        "PATCH /trials",
        "PATCH /trials/heartbeat",
        "PUT /trials/power_profile",
        "PUT /trials/probe",
    }
    assert all(route.startswith("GET ") for route in needed["read"])
    assert {"GET /api/jobs", "GET /api/jobs/{job_id:str}", "GET /schema/openapi.json"} <= needed["read"]
    a_job = "/api/jobs/{job_id:str}"
    assert needed["admin"] == {
        *("DELETE /jobs", "POST /api/import", f"POST {a_job}/trials/{{trial_number:int}}/discard"),
    }


class TestOwners:
    def test_only_the_trials_token_or_an_administrator_reports_on_a_trial(self, http: Http, tokens: Tokens) -> None:
        trial = http.begin(tokens.report)
        assert_refused(
            http.report(tokens.other, trial), 403, None, "belongs to token", tokens.report.split("_")[1], "(test)"
        )
        assert_refused(http.ask("PATCH", "/trials/heartbeat", tokens.other, json=trial), 403, None)

        for token in (tokens.report, tokens.admin):
            assert http.report(token, trial).status_code == 200
            assert http.ask("PATCH", "/trials/heartbeat", token, json=trial).status_code == 200

    def test_only_the_trials_token_or_an_administrator_ends_a_trial(self, http: Http, tokens: Tokens) -> None:
        for ending in (tokens.report, tokens.admin):
            trial = http.begin(tokens.report)
            assert_refused(http.ask("PATCH", "/trials", tokens.other, json=trial), 403, None)
            assert http.ask("GET", f"/api/jobs/{trial['job_id']}", ending).json()["trials"][0]["state"] == "running"
            assert http.ask("PATCH", "/trials", ending, json=trial).status_code == 200
            assert http.ask("GET", f"/api/jobs/{trial['job_id']}", ending).json()["trials"][0]["state"] == "failed"

    def test_job_of_a_token_is_closed_to_other_tokens(self, http: Http, tokens: Tokens) -> None:
        registered = job(job_id=f"job-{uuid.uuid4().hex}")
        first = http.begin(tokens.report, http.ask("POST", "/jobs", tokens.report, json=registered).json()["job_id"])
        job_id = first["job_id"]
        offline = {"json": {"job_id": job_id, "batch_size": 32}, "headers": {"Idempotency-Key": "k"}}
        for refused in (
            http.ask("POST", "/jobs", tokens.other, json=registered),
            http.ask("GET", "/jobs/batch_size", tokens.other, params={"job_id": job_id}),
            http.ask("POST", "/trials", tokens.other, **offline),
        ):
            owner = tokens.report.split("_")[1]
            assert_refused(refused, 403, None, f"belongs to token {owner} (test)", "use that token or another job_id")
        assert http.ask("GET", f"/api/jobs/{job_id}", tokens.other).json()["trial_count"] == 1

    def test_shared_job_keeps_each_trial_with_the_dispatched_token(
        self, http: Http, tokens: Tokens, sharing: str
    ) -> None:
        registered = job(job_id=f"job-{uuid.uuid4().hex}")
        first = http.begin(sharing, http.ask("POST", "/jobs", sharing, json=registered).json()["job_id"])
        job_id = first["job_id"]
        assert http.ask("POST", "/jobs", tokens.other, json=registered).status_code == 200
        second = http.begin(tokens.other, job_id)
        assert http.report(sharing, first).status_code == 200
        assert http.report(tokens.other, second).status_code == 200
        assert_refused(http.report(sharing, second), 403, None)
        shown = http.ask("GET", f"/api/jobs/{job_id}", tokens.read).json()
        assert (shown["owner"], shown["shared"]) == (sharing.split("_")[1], True)

    def test_administrator_may_run_any_job_and_is_logged(
        self, http: Http, tokens: Tokens, any_server: ServerProcess
    ) -> None:
        trial = http.begin(tokens.report)
        begun = http.begin(tokens.admin, trial["job_id"])
        assert http.report(tokens.admin, trial).status_code == 200
        assert http.ask("PATCH", "/trials", tokens.admin, json=trial).status_code == 200
        owner, admin = tokens.report.split("_")[1], tokens.admin.split("_")[1]
        said = f"token {admin}, an administrator's, in the place of token {owner}"
        lines = any_server.log.read_text().splitlines()
        assert sum(f"job {trial['job_id']} trial 1: {said}" in line for line in lines) == 2
        assert sum(f"job {trial['job_id']} trial {begun['trial_number']}: {said}" in line for line in lines) == 1

    def test_owner_of_a_trial_can_be_read(
        self, http: Http, tokens: Tokens, sharing: str, any_server: ServerProcess
    ) -> None:
        job_id = http.begin(sharing)["job_id"]
        http.begin(tokens.other, job_id)
        owners = [token.split("_")[1] for token in (sharing, tokens.other)]
        for path in (f"/api/jobs/{job_id}", f"/api/jobs/{job_id}/trials"):
            answer = http.ask("GET", path, tokens.read)
            assert [trial["owner"] for trial in answer.json()["trials"]] == owners
            assert sharing.split("_", 2)[2] not in answer.text
        text = bso_server("jobs", "show", job_id, "--database-url", any_server.database_url).stdout
        assert "  TOKEN  " in text
        assert f", token {owners[0]} (shared)\n" in text
        listed = bso_server("jobs", "list", "--database-url", any_server.database_url).stdout
        assert any(line.startswith(job_id) and line.endswith(f"{owners[0]} (shared)") for line in listed.splitlines())
        for owner in owners:
            assert f"  {owner}  " in text

    def test_key_does_not_reveal_a_foreign_tokens_trial(self, http: Http, tokens: Tokens, sharing: str) -> None:
        job_id = http.ask("POST", "/jobs", sharing, json=job()).json()["job_id"]

        def suggest(token: str) -> httpx.Response:
            headers = {**bearer(token), "Idempotency-Key": "the-same"}
            return httpx.get(f"{http.url}/jobs/batch_size", params={"job_id": job_id}, headers=headers)

        first = suggest(sharing)
        assert_refused(suggest(tokens.other), 403, None, "belongs to token")
        assert suggest(sharing).json() == first.json()


class TestFirstTokens:
    """On a separate server that starts without tokens."""

    def test_first_token_closes_the_server_permanently(self, server: ServerProcess) -> None:
        assert "no tokens yet" in server.log.read_text()
        with httpx.Client(base_url=server.url) as http:
            trial = begin(http, http.post("/jobs", json=job()).json()["job_id"])
        token = make_token(server.database_url, "report")

        # The trial was dispatched without a token: every token with the report scope may continue it.
        assert httpx.post(f"{server.url}/report", json={**trial, **RESULT}, headers=bearer(token)).status_code == 200
        assert_refused(httpx.get(f"{server.url}/api/jobs"), 401, None)

        assert bso_server("token", "revoke", token.split("_")[1], "--database-url", server.database_url).returncode == 0
        server.kill()
        server.start()
        assert_refused(httpx.get(f"{server.url}/api/jobs", headers=bearer(token)), 401, None, "revoked")
        assert_refused(httpx.get(f"{server.url}/api/jobs"), 401, None, "bso-server token create")
        another = make_token(server.database_url, "report")
        assert httpx.get(f"{server.url}/api/jobs", headers=bearer(another)).status_code == 200

    def test_insecure_server_logs_a_warning_and_serves_all(self, server: ServerProcess) -> None:
        token = make_token(server.database_url, "read")
        server.kill()
        server.start("--insecure")

        assert "WARNING bso_server: INSECURE" in server.log.read_text()
        assert httpx.get(f"{server.url}/api/jobs").status_code == 200
        assert httpx.get(f"{server.url}/api/jobs", headers=bearer(token)).status_code == 200
        assert_refused(httpx.get(f"{server.url}/api/jobs", headers=bearer(UNKNOWN)), 401, None)

    def test_secrets_are_never_logged(self, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        bso_server("db", "upgrade", "--database-url", database_url)
        token = make_token(database_url, "report")
        monkeypatch.setenv("ZEUS_BSO_LOG_LEVEL", "DEBUG")
        with serving(database_url, tmp_path) as server:
            Http(server.url).begin(token)
            assert httpx.get(f"{server.url}/api/jobs", auth=("me", token)).status_code == 200
            assert Http(server.url).ask("POST", "/report", token, content="{").status_code == 400
            assert Http(server.url).ask("DELETE", "/jobs?job_id=none", token).status_code == 403
            assert Http(server.url).ask("GET", "/api/jobs", UNKNOWN).status_code == 401
            assert httpx.get(f"{server.url}/api/jobs", headers={"Authorization": token}).status_code == 401
            server.stop()
        log = server.log.read_text()
        assert "DEBUG" in log, "the log is not as detailed as this test means it to be"
        for secret in (token[14:], UNKNOWN[14:], base64.b64encode(f"me:{token}".encode()).decode()):
            assert secret not in log
        assert all("refused with 401" in line for line in log.splitlines() if "authorization" in line.lower())


@asynccontextmanager
async def in_app(settings: Settings) -> AsyncIterator[Callable[[str], httpx.AsyncClient]]:
    """Run an application in this process; yield a function that makes a client at a given address."""
    app = create_app(settings)
    async with app.lifespan():
        yield partial(client_of, app)


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
async def test_address_in_a_forwarding_header_is_not_trusted(new_database: str, header: str) -> None:
    """With a server that trusts every proxy, the address would be taken from the header."""
    async with in_app(Settings(database_url=new_database)) as client:
        for address in (LOCAL, "::1", "::ffff:127.0.0.1", FOREIGN):
            answer = await client(address).get("/api/jobs", headers={header: LOCAL})
            assert answer.status_code == 403


class TestLimits:
    async def test_foreign_host_names_are_refused(self, new_database: str) -> None:
        async with in_app(Settings(database_url=new_database, allowed_hosts="bso.example, *.corp.example")) as client:
            here = client(LOCAL)
            for host in ("bso.example", "bso.example:1", "a.corp.example"):
                assert (await here.get("/api/jobs", headers={"Host": host})).status_code == 200
            refused = await here.get("/api/jobs", headers={"Host": "evil.example"})
            assert_refused(refused, 400, None, "'evil.example'", "ZEUS_BSO_ALLOWED_HOSTS")
            # Probes use the machine's address instead of its name.
            assert (await here.get("/health/live", headers={"Host": "10.0.0.7"})).status_code == 200

    async def test_repeated_header_used_for_access_is_refused(self, new_database: str) -> None:
        async with in_app(Settings(database_url=new_database, allowed_hosts="*")) as client:
            for name in ("Host", "Authorization", "Origin"):
                values = [(name, "evil.example"), (name, LOCAL)]
                refused = await client(LOCAL).get("/api/jobs", headers=values)
                assert refused.status_code == 400
                assert f"several {name} headers" in refused.text

    async def test_requests_from_foreign_sites_are_refused(self, new_database: str) -> None:
        async with in_app(Settings(database_url=new_database)) as client:
            here = client(LOCAL)
            for site in ("same-origin", "same-site", "none"):
                assert (await here.get("/api/jobs", headers={"Sec-Fetch-Site": site})).status_code == 200
            refused = await here.post("/jobs", json={}, headers={"Sec-Fetch-Site": "cross-site"})
            assert_refused(refused, 403, None, "another site")

    async def test_foreign_page_changes_nothing(self, new_database: str) -> None:
        settings = Settings(database_url=new_database, allowed_hosts="localhost.example, board.example, *")
        async with in_app(settings) as client:
            here = client(LOCAL)
            for method, path in (
                ("POST", "/jobs"),
                ("GET", "/jobs/batch_size?job_id=none"),
                ("POST", "/report"),
                ("PATCH", "/trials/heartbeat"),
                ("DELETE", "/jobs?job_id=none"),
                ("POST", "/api/import"),
            ):
                for origin in ("http://evil.example", "http://localhost:3000", "null"):
                    refused = await here.request(method, path, headers={"Origin": origin})
                    assert_refused(refused, 403, None, repr(origin), "ZEUS_BSO_ALLOWED_HOSTS")
                for headers in ({"Origin": "http://localhost:8000"}, {"Origin": "https://board.example"}, {}):
                    answer = await here.request(method, path, headers=headers)
                    assert answer.status_code not in {401, 403}, path

    async def test_only_a_followed_link_leads_from_a_foreign_site_to_a_page(self) -> None:
        """Use a separate application with a page and a route that is no page."""

        async def none() -> None: ...

        authenticator = Authenticator(cast("Any", None), insecure=True)
        app = Litestar(
            [get("/page", opt=PAGE)(none), get("/data")(none), post("/page", opt={**PAGE, **needs(Scope.READ)})(none)],
            middleware=[AccessControl(authenticator, ["*"], read_timeout_s=60)],
            exception_handlers=EXCEPTION_HANDLERS,
            logging_config=None,  # Litestar's default would set the level of the root logger for all later tests
        )
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            assert (await http.get("/page", headers=link)).status_code == 200
            assert (await http.get("/data", headers={**link, "Sec-Fetch-Site": "none"})).status_code == 200
            for otherwise in ({"Sec-Fetch-Mode": "no-cors"}, {"Sec-Fetch-Dest": "iframe"}):
                assert_refused(await http.get("/page", headers={**link, **otherwise}), 403, None, "another site")
            assert_refused(await http.get("/page", headers={"Sec-Fetch-Site": "cross-site"}), 403, None)
            assert_refused(await http.get("/data", headers=link), 403, None, "another site")
            assert_refused(await http.post("/page", headers=link), 403, None, "another site")

    @pytest.mark.parametrize("announced", [True, False])
    async def test_large_body_is_refused_before_reading(self, new_database: str, announced: bool) -> None:
        size, piece = 100 * 1024 * 1024, b"x" * 65536
        taken = 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal taken
            for _ in range(size // len(piece)):
                taken += len(piece)
                yield piece

        async with in_app(Settings(database_url=new_database)) as client:
            headers = {"content-type": "application/json", **({"content-length": str(size)} if announced else {})}
            refused = await client(LOCAL).post("/jobs", content=body(), headers=headers)
            assert_refused(refused, 413, None, "more than 1048576 bytes")
        assert taken <= (0 if announced else 1024 * 1024 + len(piece))

    async def test_refused_clients_are_logged(self, new_database: str, caplog: pytest.LogCaptureFixture) -> None:
        token, other = make_token(new_database, "read"), make_token(new_database, "report")

        settings = Settings(database_url=new_database, allowed_hosts="localhost")
        async with in_app(settings) as client, client(FOREIGN) as http:
            for shown, status in ((None, 401), (UNKNOWN, 401), (token, 403)):
                headers = {} if shown is None else bearer(shown)
                assert (await http.delete("/jobs?job_id=none", headers=headers)).status_code == status
            large = await http.post("/report", content=b"x" * (1024 * 1024 + 1), headers=bearer(other))
            assert large.status_code == 413
            assert (await http.get("/api/jobs", headers={"Host": "evil.example"})).status_code == 400
            # Errors without a refusal leave no line.
            assert (await http.get("/api/jobs/no%0ane", headers=bearer(token))).status_code in {404, 422}
            assert (await http.delete("/jobs?job_id=no%0ane", headers=bearer(other))).status_code == 403
        refused = [record.getMessage() for record in caplog.records if record.getMessage().startswith("refused")]
        ids = {name: f"token {text.split('_')[1]}" for name, text in {"read": token, "report": other}.items()}
        assert [line.partition(": ")[2] for line in refused] == [
            f"DELETE '/jobs' from {FOREIGN}, no token: this server needs a token",
            f"DELETE '/jobs' from {FOREIGN}, token 00000000: the token is unknown, revoked or replaced",
            f"DELETE '/jobs' from {FOREIGN}, {ids['read']}: {ids['read']} has no scope admin, which this request "
            "needs; make another one",
            f"POST '/report' from {FOREIGN}, {ids['report']}: Request Entity Too Large",
            f"GET '/api/jobs' from {FOREIGN}, no token: this server does not answer to host 'evil.example'",
            f"DELETE '/jobs' from {FOREIGN}, {ids['report']}: {ids['report']} has no scope admin, which this request "
            "needs; make another one",
        ]
        assert [int(line.split()[2].rstrip(":")) for line in refused] == [401, 401, 403, 413, 400, 403]


# --- Rotated, revoked and replaced tokens, and what belongs to them ---------------------------------------------------


@dataclass
class Site:
    """A server, a job on it, and an administrator's commands."""

    server: ServerProcess
    job: JobSpec
    until_the_end: ExitStack

    def run(self, *command: str) -> str:
        done = bso_server(*command, "--database-url", self.server.database_url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def token(self, name: str, scope: str = "report", *options: str) -> str:
        return self.run("token", "create", "--name", name, "--scope", scope, *options).strip()

    def rotate(self, token: str, *options: str) -> str:
        return self.run("token", "rotate", id_of(token), *options).strip()

    def forget(self) -> None:
        """Restart the server, so that it reads its tokens again without waiting ten seconds."""
        self.server.kill()
        self.server.start()

    def session(self, token: str) -> TrialSession:
        """Return a training that uses a second and ten joules per epoch."""
        client = self.until_the_end.enter_context(BsoClient(self.server.url, token=token, retries=NO_RETRIES))
        return TrialSession(self.job, client, seconds_and_joules(1.0, 10.0))

    def begun(self, token: str) -> TrialSession:
        session = self.session(token)
        session.ask()
        session.begin_measurement()
        return session

    def finish(self, token: str, state: dict[str, object]) -> None:
        """Resume a training from a checkpoint and reach the target."""
        resumed = self.session(token)
        assert resumed.resume(state)
        resumed.begin_measurement()
        assert resumed.report_evaluation(0.95).converged
        resumed.end()

    def trials(self, token: str) -> list[TrialView]:
        with BsoClient(self.server.url, token=token) as client:
            return list(client.show_job(self.job.job_id).trials)

    def sync(self, token: str, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setenv("ZEUS_SERVER_URL", self.server.url)
        monkeypatch.setenv("ZEUS_BSO_TOKEN", token)
        return main(["sync"])


@pytest.fixture
def site(server: ServerProcess) -> Iterator[Site]:
    job_id = f"digits-{uuid.uuid4().hex[:8]}"
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(32, 64),
        default_batch_size=64,
        target_metric=0.9,
        max_epochs=4,
    )
    with ExitStack() as until_the_end:
        yield Site(server, job, until_the_end)


def id_of(token: str) -> str:
    return token.split("_")[1]


def through_a_checkpoint(session: TrialSession) -> dict[str, object]:
    state: dict[str, object] = json.loads(json.dumps(session.state_dict()))
    session.end(KeyboardInterrupt())
    return state


def facts(trial: TrialView) -> tuple[TrialState, float | None, str | None]:
    return trial.state, trial.epochs, trial.owner


class TestAnotherToken:
    def test_training_with_a_foreign_token_does_not_begin(self, site: Site) -> None:
        owner, other = site.token("nightly"), site.token("other")
        through_a_checkpoint(site.begun(owner))
        with pytest.raises(ZeusBSOTokenError, match=rf"belongs to token {id_of(owner)} \(nightly\).*docs/tokens.md"):
            site.session(other).ask()
        assert len(site.trials(owner)) == 1

    def test_training_resumed_with_a_foreign_token_continues_and_an_administrator_delivers_the_results(
        self, site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner, other = site.token("nightly"), site.token("other")
        first = site.begun(owner)
        first.report_evaluation(0.5)
        state = through_a_checkpoint(first)

        with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
            site.finish(other, state)
        refused, waiting = warnings_in(caplog)
        assert f"belongs to token {id_of(owner)} (nightly), and token {id_of(other)} can neither" in refused
        assert "use that token, or have an administrator do it" in refused
        assert "The training continues" in refused
        assert "1 results of job" in waiting
        assert [facts(trial) for trial in site.trials(owner)] == [(TrialState.SUSPENDED, 1, id_of(owner))]

        assert site.sync(other, monkeypatch) == 1  # no trial has changed, and no result is lost
        assert len(default_outbox().waiting()) == 1
        assert site.sync(site.token("operator", "admin"), monkeypatch) == 0
        assert [facts(trial) for trial in site.trials(owner)] == [(TrialState.COMPLETED, 2, id_of(owner))]


class TestRevocation:
    def test_administrators_sync_completes_a_trial_of_a_revoked_token(
        self, site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner, other = site.token("nightly", "report", "--share"), site.token("other")
        admin = site.token("operator", "admin")
        session = site.begun(owner)
        session.report_evaluation(0.5)
        said = site.run("token", "revoke", id_of(owner))
        assert "Only administrators report on its trials now" in said
        assert "docs/tokens.md" in said
        site.forget()
        assert session.report_evaluation(0.95).converged
        session.end()
        assert any("does not accept the token (401" in warning for warning in warnings_in(caplog))
        assert [facts(trial) for trial in site.trials(admin)] == [(TrialState.RUNNING, 1, id_of(owner))]

        caplog.clear()
        site.begun(other).end(KeyboardInterrupt())
        (stays,) = warnings_in(caplog)
        assert f"results that had waited in {default_outbox().directory}" in stays
        assert f"job {site.job.job_id} for {site.server.url}: " in stays
        assert f"belongs to token {id_of(owner)} (nightly)" in stays

        assert site.sync(other, monkeypatch) == 1
        assert site.sync(admin, monkeypatch) == 0
        assert facts(site.trials(admin)[0]) == (TrialState.COMPLETED, 2, id_of(owner))
        assert default_outbox().waiting() == default_outbox().refused() == []


class TestRotation:
    def test_rotation_lets_the_old_secret_finish_and_the_new_secret_start(self, site: Site) -> None:
        old = site.token("nightly")
        session = site.begun(old)
        session.report_evaluation(0.5)
        new = site.rotate(old)
        assert id_of(new) == id_of(old)
        assert not session.report_evaluation(0.6).stop_train
        state = through_a_checkpoint(session)
        assert [facts(trial) for trial in site.trials(old)] == [(TrialState.SUSPENDED, 2, id_of(old))]

        site.finish(new, state)
        assert [facts(trial) for trial in site.trials(new)] == [(TrialState.COMPLETED, 3, id_of(old))]


async def test_trial_without_an_owner_belongs_to_the_owner_of_the_job(bso: JobService) -> None:
    """Imports create such trials."""
    tokens, commands = service.Tokens(bso.store), bso.service.commands
    other = (await tokens.create("other", [Scope.REPORT]))[1].caller()
    for shares_jobs in (False, True):
        owner = (await tokens.create("owner", [Scope.REPORT], shares_jobs=shares_jobs))[1].caller()
        registration = CreatedJob.model_validate(job(**THREE_SIZES))
        await bso.service.register(registration, owner)
        trial = trial_id(await bso.service.transact(commands.begin_trial, registration.job_id))
        beat = Heartbeat(**trial.model_dump())
        with nullcontext() if shares_jobs else pytest.raises(ForbiddenError, match="belongs to token"):
            await bso.service.transact(commands.heartbeat, beat, other)
        assert (await bso.service.transact(commands.heartbeat, beat, owner)).state is TrialState.RUNNING


def test_list_of_tokens_shows_rotations_and_sharing(site: Site) -> None:
    token = site.token("nightly", "report", "--share")
    site.rotate(token, "--grace", "7d")
    (shown,) = json.loads(site.run("token", "list", "--json"))["tokens"]
    assert (shown["shares_jobs"], shown["revoked_at"]) == (True, None)
    assert shown["created_at"] < shown["rotated_at"] < shown["previous_secret_until"]
    header, line = site.run("token", "list").splitlines()
    assert "OLD SECRET UNTIL" in header
    assert " yes " in line
    assert line.split()[-3] == shown["previous_secret_until"][:10]
