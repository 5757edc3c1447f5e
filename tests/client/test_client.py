from __future__ import annotations

import json
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bso_server.core.savings import savings
from bso_server.core.verdict import Judge
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.port import NO_RETRIES, Retries
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimeError, ZeusBSOServerUnreachableError
from zeus_plugins.protocol import (
    ZEUS,
    CreatedJob,
    Ending,
    GpuConfig,
    JobSpec,
    OfflineTrial,
    Origin,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialId,
    TrialState,
)

JOB = CreatedJob.of(
    JobSpec(job_id="mnist-1", job_id_prefix="mnist", batch_sizes=(64, 32), default_batch_size=32, beta_knob=None),
    GpuConfig(max_power=300.0, number_of_gpus=2, gpu_model="A40"),
)
TRIAL = TrialId(job_id="mnist-1", batch_size=32, trial_number=3)
RESULT = TrainingResult(**TRIAL.model_dump(), time=1.5, energy=20.0, metric=0.9, current_epoch=2, energy_source="nvml")
TOKEN = "s3cret"  # noqa: S105 - no real token
DISPATCH = {"job_id": "mnist-1", "batch_size": 32, "trial_number": 3}
NAMED = DISPATCH | {"registration_id": None, "lease_epoch": None, "dispatch_id": None}
NO_LIMIT = {"power_limit_w": None, "power_limits": None}
VERDICT: dict[str, Any] = {"stop_train": False, "converged": False, "message": "on"}


class Recorder:
    """Answer every request with one answer and keep the last request."""

    def __init__(self, status: int = 200, **answer: object) -> None:
        self.status, self.answer = status, answer
        self.request: httpx.Request | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.request = request
        return httpx.Response(self.status, **self.answer)


def client_of(
    handler: Callable[[httpx.Request], httpx.Response], url: str = "http://bso:8000", **options: Any
) -> BsoClient:
    return BsoClient(url, transport=httpx.MockTransport(handler), retries=NO_RETRIES, **options)


NOTHING_SAVED = savings(JOB, [], None, lambda _: Judge(JOB.default_batch_size, JOB.default_batch_size))

REQUESTS: dict[str, Any] = {
    "register": (
        lambda client: client.register(JOB),
        JOB.model_dump(mode="json"),
        "POST /jobs",
        JOB.model_dump(mode="json", exclude={"warm"}) | {"revise": False},
    ),
    "request_trial": (
        lambda client: client.request_trial("a&b c"),
        DISPATCH,
        "GET /jobs/batch_size?job_id=a%26b+c",
        None,
    ),
    "send_report": (
        lambda client: client.send_report(RESULT),
        VERDICT,
        "POST /report",
        {"time": 1.5, "energy": 20.0, "metric": 0.9, "current_epoch": 2, "energy_source": "nvml", "judged_by": None}
        | {"waited_share": None, "startup_s": None, "watched": None, "rank": None}
        | NO_LIMIT
        | NAMED,
    ),
    "end_trial": (
        lambda client: client.end_trial(TrialDispatch(**DISPATCH, origin=Origin.BANDIT, reason="why not")),
        None,
        "PATCH /trials",
        NAMED | NO_LIMIT | {"outcome": "failed", "refused_size": False, "ended_early": False, "detail": None},
    ),
    "end_trial otherwise": (
        lambda client: client.end_trial(TRIAL, Ending(outcome=TrialState.SUSPENDED, detail="the node was needed")),
        None,
        "PATCH /trials",
        NAMED
        | NO_LIMIT
        | {"outcome": "suspended", "refused_size": False, "ended_early": False, "detail": "the node was needed"},
    ),
    "heartbeat": (
        lambda client: client.heartbeat(TRIAL),
        {"state": "running", "lease_s": 180, "interval_s": 30, "lease_epoch": 1},
        "PATCH /trials/heartbeat",
        NAMED | {"regular": True, "resumes": False},
    ),
    "record_offline": (
        lambda client: client.record_offline(OfflineTrial(job_id="mnist-1", batch_size=32), "key"),
        DISPATCH,
        "POST /trials",
        {"job_id": "mnist-1", "batch_size": 32, "continues": None},
    ),
    "delete_job": (lambda client: client.delete_job("mnist-1"), None, "DELETE /jobs?job_id=mnist-1", None),
    "list_jobs": (lambda client: client.list_jobs(), {"jobs": []}, "GET /api/jobs", None),
    "show_job": (
        lambda client: client.show_job("a/b"),
        {
            "job": JOB.model_dump(mode="json"),
            "stage": "pruning",
            "min_cost_j": None,
            "best_batch_size": None,
            "arms": [],
            "trial_count": 0,
            "trials": [],
            "savings": NOTHING_SAVED.model_dump(mode="json"),
        },
        "GET /api/jobs/a%2Fb",
        None,
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("prefix", ["", "/tools/bso"])
def test_method_sends_exactly_the_documented_request(name: str, prefix: str) -> None:
    call, answer, request_line, body = REQUESTS[name]
    server = Recorder(json=answer)
    with client_of(server, f"http://bso:8000{prefix}/") as client:
        call(client)
    method, target = request_line.split(" ")
    assert server.request is not None
    path = server.request.url.raw_path.decode().replace("%20", "+")  # versions of httpx write a space differently
    assert (server.request.method, path) == (method, prefix + target)
    assert server.request.url.host == "bso"
    assert (json.loads(server.request.content) if server.request.content else None) == body


def test_answers_of_a_zeus_server_need_no_own_fields() -> None:
    with client_of(Recorder(json=DISPATCH)) as client:
        assert client.request_trial("mnist-1") == TrialDispatch(**DISPATCH, origin=None, reason=None)
    with client_of(Recorder(json=VERDICT)) as client:
        assert client.send_report(RESULT) == ReportResponse(**VERDICT, reason=None)
    theirs = {key: value for key, value in JOB.model_dump(mode="json").items() if key != "policy"}
    with client_of(Recorder(201, json=theirs)) as client:
        assert client.register(JOB) == JOB.model_copy(update={"policy": ZEUS})


@pytest.mark.parametrize("content", [b"", b"null", b'{"anything": 1}'])
def test_ending_a_trial_accepts_any_answer(content: bytes) -> None:
    with client_of(Recorder(content=content)) as client:
        client.end_trial(TRIAL)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"json": {"message": "no such job", "detail": "longer text"}}, "): no such job"),
        ({"json": {"detail": "no such job"}}, "): no such job"),
        ({"json": {"detail": [{"loc": ["body", "time"], "msg": "too small"}]}}, "): time: too small"),
        ({"text": "Internal   Server\nError " + "x" * 500}, "REASON: Internal Server Error " + "x" * 178 + ". Is"),
        ({"text": '["no","object"]'}, '["no","object"]. Is this a batch size optimization server?'),
        ({"json": {"other": 1}}, "Is this a batch size optimization server?"),
        ({"content": b""}, "no text"),
    ],
)
def test_refusal_quotes_the_server_and_names_the_request(answer: dict[str, Any], said: str) -> None:
    for status in (404, 500):
        with client_of(Recorder(status, **answer)) as client, pytest.raises(ZeusBSORuntimeError) as caught:
            client.request_trial("mnist-1")
        assert said.replace("REASON", HTTPStatus(status).phrase) in str(caught.value)
        assert f"GET http://bso:8000/jobs/batch_size?job_id=mnist-1 failed ({status})" in str(caught.value)
        assert caught.value.status == status
        assert not isinstance(caught.value, ZeusBSOServerUnreachableError)


def test_refused_job_is_a_configuration_error_naming_each_field_once() -> None:
    errors = [{"field": "eta_knob", "message": "too large"}, {"field": "beta_knob", "message": "too small"}]
    for message in ("the job is invalid", "the job is invalid; eta_knob: too large"):
        server = Recorder(422, json={"message": message, "errors": errors})
        with client_of(server) as client, pytest.raises(ZeusBSOConfigError) as caught:
            client.register(JOB)
        assert str(caught.value).endswith("the job is invalid; eta_knob: too large; beta_knob: too small")


def test_conflict_is_a_configuration_error_only_at_registration() -> None:
    with client_of(Recorder(409, json={"message": "other configuration"})) as client:
        with pytest.raises(ZeusBSOConfigError, match="other configuration"):
            client.register(JOB)
        with pytest.raises(ZeusBSORuntimeError, match="other configuration") as caught:
            client.send_report(RESULT)
    assert caught.value.status == 409


@pytest.mark.parametrize("status", [401, 403])
def test_refused_token_names_the_variable_to_set(status: int) -> None:
    client = client_of(Recorder(status, json={"message": "token expired"}))
    with client, pytest.raises(ZeusBSOConfigError, match=r"token expired.*ZEUS_BSO_TOKEN"):
        client.register(JOB)


def test_redirect_names_the_new_address() -> None:
    server = Recorder(308, headers={"location": "https://me:secret@bso/jobs?key=secret"})
    with client_of(server) as client, pytest.raises(ZeusBSORuntimeError) as caught:
        client.register(JOB)
    assert "redirected to https://***@bso/jobs?***; set server_url" in str(caught.value)


@pytest.mark.parametrize("name", REQUESTS)
def test_page_of_a_foreign_web_server_is_recognized(name: str) -> None:
    problem = r"http://bso:8000/.*does not look like a batch size optimization server"
    client = client_of(Recorder(text="<html>Welcome</html>"))
    with client, pytest.raises(ZeusBSORuntimeError, match=problem):
        REQUESTS[name][0](client)


def test_answer_without_a_required_field_names_the_field() -> None:
    with client_of(Recorder(json={"job_id": "a"})) as client, pytest.raises(ZeusBSORuntimeError, match="batch_size: "):
        client.request_trial("a")


# --- Repeated requests ------------------------------------------------------------------------------------------------


class Troubled:
    """Give these answers in turn, raising exceptions among them, and fail the test beyond the last."""

    def __init__(self, *answers: int | type[httpx.TransportError]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def client(self, **retries: Any) -> BsoClient:
        retries = {"attempts": 4, "backoff_s": 0.0} | retries
        return BsoClient("http://bso", transport=httpx.MockTransport(self), retries=Retries(**retries))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if not isinstance(answer, int):
            raise answer("as the test asked", request=request)
        return httpx.Response(answer, json=DISPATCH)


PASSING = [408, 425, 429, 500, 502, 503, 504, httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError]
LASTING = [400, 401, 403, 404, 409, 422, 302]


@pytest.mark.parametrize("trouble", PASSING)
def test_temporary_failure_is_retried(trouble: int | type[httpx.TransportError]) -> None:
    server = Troubled(trouble, trouble, 200)
    assert server.client().request_trial("mnist-1").trial_number == 3
    keys = {request.headers["Idempotency-Key"] for request in server.requests}
    assert (len(server.requests), len(keys)) == (3, 1)  # one trial, however often the request is repeated


def test_each_dispatch_has_a_new_key() -> None:
    server = Troubled(200, 200, 200)
    client = server.client()
    client.request_trial("mnist-1")
    client.request_trial("mnist-1")
    client.request_trial("mnist-1", "a key of one's own")
    first, second, third = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first != second
    assert third == "a key of one's own"


@pytest.mark.parametrize("trouble", LASTING)
def test_permanent_failure_is_not_retried(trouble: int) -> None:
    server = Troubled(trouble)
    with pytest.raises((ZeusBSORuntimeError, ZeusBSOConfigError)):
        server.client().request_trial("mnist-1")


@pytest.mark.parametrize(
    ("attempts", "ask"),
    [
        (4, lambda server: server.client(attempts=4).request_trial("mnist-1")),
        (1, lambda server: server.client().delete_job("mnist-1")),
    ],
    ids=["attempts have a limit", "a job is deleted once"],
)
def test_attempts_of_a_request_are_limited(attempts: int, ask: Callable[[Troubled], None]) -> None:
    server = Troubled(*[503] * attempts)
    with pytest.raises(ZeusBSORuntimeError, match="503"):
        ask(server)
    assert server.answers == []


def test_request_after_the_end_of_all_requests_is_not_sent() -> None:
    server = Troubled(503)
    with pytest.raises(ZeusBSOServerUnreachableError, match="timed out"):
        server.client(attempts=4, until_s=-1.0).request_trial("mnist-1")
    assert server.answers == [503]


def test_attempts_of_a_request_share_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, limits_s = [0.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])

    def answer_late(request: httpx.Request) -> httpx.Response:
        limits_s.append(request.extensions["timeout"]["read"])
        now_s[0] += 4.0
        return httpx.Response(503)

    client = BsoClient(
        "http://bso", timeout_s=10.0, transport=httpx.MockTransport(answer_late), retries=Retries(backoff_s=0)
    )
    with client, pytest.raises(ZeusBSORuntimeError):
        client.request_trial("mnist-1")
    assert limits_s == [10.0, 6.0, 2.0]


@given(attempt=st.integers(min_value=1, max_value=6), backoff_s=st.floats(min_value=0, max_value=10))
def test_waits_are_random_and_bounded(attempt: int, backoff_s: float) -> None:
    assert 0 <= Retries(backoff_s=backoff_s).wait_s(attempt) <= backoff_s * 2 ** (attempt - 1)


def test_two_trainings_wait_differently() -> None:
    assert len({Retries().wait_s(3) for _ in range(20)}) == 20


def test_status_of_an_error_distinguishes_outages_from_refusals() -> None:
    assert all(ZeusBSORuntimeError("", status=status).is_outage for status in (None, 500, 503, 429, 408))
    assert not any(ZeusBSORuntimeError("", status=status).is_outage for status in (404, 409, 302, 200))


# --- no answer: real sockets ----------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def url_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_refused_connection_is_an_outage_with_advice(listener: socket.socket) -> None:
    url = url_of(listener)
    listener.close()
    with BsoClient(url, retries=NO_RETRIES) as client, pytest.raises(ZeusBSOServerUnreachableError) as caught:
        client.request_trial("mnist-1")
    text = str(caught.value)
    assert all(word in text for word in (url, "refused", "bso-server serve", "ZEUS_SERVER_URL"))
    assert "\n" not in text
    assert caught.value.status is None


def test_silent_server_times_out(listener: socket.socket) -> None:
    client = BsoClient(url_of(listener), timeout_s=0.1, retries=NO_RETRIES)
    with client, pytest.raises(ZeusBSOServerUnreachableError, match=r"timed out after 0\.1 s"):
        client.request_trial("mnist-1")


def test_server_with_a_foreign_protocol_is_unreachable(listener: socket.socket) -> None:
    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    thread = threading.Thread(target=greet)
    thread.start()
    client = BsoClient(url_of(listener), retries=NO_RETRIES)
    with client, pytest.raises(ZeusBSOServerUnreachableError, match=url_of(listener)):
        client.request_trial("mnist-1")
    thread.join()


# --- configuration and secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("ftp://bso", "ftp://bso"),
        ("http://", "http://"),
        ("", "''"),
        ("http://bso:port", "http://bso:port"),
        ("http://bso:99999", "http://bso:99999"),
        ("http://bso\x00", "bso"),
        ("http://bso/?key=secret", "http://bso/?***"),
        ("http://bso/#secret", "http://bso/?***"),
        ("ftp://me:secret@bso", "ftp://***@bso"),
        ("me:secret@bso:80", "***@bso:80"),
        ("http://me:secret@bso:port", "http://***@bso:port"),
        ("http://me:sec/ret@bso:port", "http://***@bso:port"),
        ("http://me:sec?ret@bso", "http://***@bso"),
        ("http://me:sec\nret@bso", "http://***@bso"),
    ],
)
def test_unusable_server_url_is_named(url: str, named: str) -> None:
    with pytest.raises(ZeusBSOConfigError) as caught:
        BsoClient(url)
    assert named in str(caught.value)
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_timeout_must_be_positive(timeout_s: float) -> None:
    with pytest.raises(ZeusBSOConfigError, match="timeout_s"):
        BsoClient("http://bso", timeout_s=timeout_s)


@pytest.mark.parametrize("token", ["two\nlines", "sécret"])
def test_token_unfit_for_a_header_is_refused_without_showing_the_token(token: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match="ZEUS_BSO_TOKEN") as caught:
        BsoClient("http://bso", token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "token", "authorization"),
    [
        ("http://bso", None, None),
        (" http://bso\n", "", None),
        ("http://bso", "t0ken\n", "Bearer t0ken"),
        ("http://me:p%40ss@bso", None, "Basic bWU6cEBzcw=="),
    ],
)
def test_authorization_header_follows_token_or_url(url: str, token: str | None, authorization: str | None) -> None:
    server = Recorder(json=DISPATCH)
    with client_of(server, url, token=token) as client:
        client.request_trial("mnist-1")
    assert server.request is not None
    assert server.request.headers.get("authorization") == authorization


def test_user_in_the_url_excludes_a_token() -> None:
    with pytest.raises(ZeusBSOConfigError, match="only one") as caught:
        BsoClient("http://me:passw0rd@bso", token=TOKEN)
    assert "passw0rd" not in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(("url", "token"), [("http://bso", TOKEN), ("http://me:s3cret@bso", None)])
def test_secrets_are_never_shown(url: str, token: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("cannot connect", request=request)

    shown = []
    for server in (Recorder(500, text="oops"), Recorder(403, text="forbidden"), Recorder(text="<p>"), unreachable):
        with client_of(server, url, token=token) as client:
            shown.append(repr(client))
            with pytest.raises((ZeusBSORuntimeError, ZeusBSOConfigError)) as caught:
                client.request_trial("mnist-1")
            shown.append(str(caught.value))
    assert "500 Internal Server Error" in caplog.text
    assert TOKEN not in caplog.text + "".join(shown)


def test_token_echoed_by_the_server_is_hidden() -> None:
    client = client_of(Recorder(401, json={"message": "unknown token s3cret"}), token=TOKEN)
    with client, pytest.raises(ZeusBSOConfigError, match=r"unknown token \*\*\*"):
        client.request_trial("mnist-1")


def test_client_can_be_pickled_before_and_after_the_first_call(listener: socket.socket) -> None:
    url = url_of(listener)
    listener.close()
    with BsoClient(url, token=TOKEN, retries=NO_RETRIES) as client:
        for _ in range(2):
            with pickle.loads(pickle.dumps(client)) as copy, pytest.raises(ZeusBSOServerUnreachableError, match=url):  # noqa: S301
                copy.request_trial("mnist-1")
            with pytest.raises(ZeusBSOServerUnreachableError):
                client.request_trial("mnist-1")


def test_closed_client_can_be_used_again() -> None:
    client = client_of(Recorder(json=DISPATCH))
    for _ in range(2):
        client.close()
        assert client.request_trial("mnist-1").trial_number == 3
    client.close()


# --- the client of an environment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_invalid_timeout_in_the_environment_is_refused(text: str) -> None:
    environ = {"ZEUS_SERVER_URL": "http://bso", "ZEUS_BSO_TIMEOUT_S": text}
    with pytest.raises(ZeusBSOConfigError, match=f"ZEUS_BSO_TIMEOUT_S is '{text}'"):
        client_from_environment(environ=environ)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ZEUS_EMISSIONS_FILE", "trackers get zeus/energy_j"),
        ("ZEUS_IDLE_POWER_W", "subtract its watts"),
        ("ZEUS_SUMMARY_FILE", "print callback.summary"),
    ],
)
def test_variable_of_an_earlier_version_is_refused(name: str, instead: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=f"{name} is no longer read: unset it; {instead}"):
        client_from_environment(environ={"ZEUS_SERVER_URL": "http://bso", name: "3"})


def test_timeout_is_read_from_the_environment() -> None:
    environ = {"ZEUS_SERVER_URL": "http://bso", "ZEUS_BSO_TIMEOUT_S": "2.5"}
    assert client_from_environment(environ=environ).timeout_s == 2.5
    assert client_from_environment(environ=environ, timeout_s=4).timeout_s == 4
    assert client_from_environment(environ={"ZEUS_SERVER_URL": "http://bso"}).timeout_s == 10


@pytest.mark.parametrize(
    ("arguments", "url", "token"), [([], "http://there", "theirs"), (["http://here", "mine"], "http://here", "mine")]
)
def test_arguments_override_the_environment(arguments: list[str], url: str, token: str) -> None:
    environ = {"ZEUS_SERVER_URL": "http://there", "ZEUS_BSO_TOKEN": "theirs"}
    with client_from_environment(*arguments, environ=environ) as client:
        assert isinstance(client, BsoClient)
        assert client.server_url == url
        assert client._connection().headers["authorization"] == f"Bearer {token}"


@pytest.mark.parametrize("environ", [{}, {"ZEUS_SERVER_URL": ""}])
def test_missing_server_url_selects_the_embedded_server(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")
    assert client_from_environment(environ=environ).server_url == f"embedded://{tmp_path / 'bso.sqlite3'}"
