"""Invalid requests of clients: each answer names the invalid field, and the database is unchanged.

Unusual but valid requests are included, on each kind of database.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.engine import make_url

from bso_server.cli.serve import MOST_HEAD_BYTES
from bso_server.errors import InvalidImportError
from tests.support import wire
from tests.support.exports import encoded, export_over, import_beside, renamed
from tests.support.jobs import THREE_SIZES, job
from tests.support.servers import ServerProcess, memory_of
from tests.support.wire import begin

JSON = {"content-type": "application/json"}


# Longest answer to an invalid request of any size.
LONGEST_ANSWER = 16_000


@dataclass(frozen=True)
class Scene:
    """A job with a running and an ended trial, and a second job with trials.

    Attributes:
        http: Client of the server.
        running: The running trial's id.
        reported: Its last report, the second one.
        ended: The id of the trial that has ended.
        final: Its last report.
        verdict: The answer to the last report of the ended trial.
        other_job: The other job's id; its trial 1 has the batch size of the running trial.
        file: A connection to the server's SQLite file.
    """

    http: httpx.Client
    running: dict[str, Any]
    reported: dict[str, Any]
    ended: dict[str, Any]
    final: dict[str, Any]
    verdict: dict[str, Any]
    other_job: str
    file: sqlite3.Connection

    def stored(self) -> list[Any]:
        """Return a number that changes with the SQLite file."""
        return self.file.execute("PRAGMA data_version").fetchall()

    @contextmanager
    def nothing_stored(self) -> Iterator[None]:
        """Assert that the block leaves the database unchanged."""
        before = self.stored()
        yield
        assert self.stored() == before


def register(http: httpx.Client, **fields: Any) -> str:
    job_id = f"job-{uuid.uuid4().hex[:8]}"
    answer = http.post("/jobs", json=job(**{"job_id": job_id, **THREE_SIZES, **fields}))
    assert answer.status_code == 201, answer.text
    return job_id


@pytest.fixture(scope="module")
def scene(shared_server: ServerProcess) -> Iterator[Scene]:
    path = make_url(shared_server.database_url).database
    with (
        httpx.Client(base_url=shared_server.url, timeout=60) as http,
        closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file,
    ):
        job_id, other_job = register(http), register(http)
        ended, running = begin(http, job_id), begin(http, job_id)
        final = {"time": 5.0, "energy": 500.0, "metric": 0.95, "current_epoch": 2}
        verdict = http.post("/report", json={**ended, **final}).raise_for_status().json()
        for epoch in (1, 2):
            reported = {"time": epoch * 2.0, "energy": epoch * 200.0, "metric": 0.5, "current_epoch": epoch}
            http.post("/report", json={**running, **reported}).raise_for_status()
        begin(http, other_job)
        yield Scene(http, running, reported, ended, final, verdict, other_job, file)


def good_body(scene: Scene, path: str) -> dict[str, Any]:
    """Return a valid body of the route."""
    match path:
        case "/jobs":
            return job(**THREE_SIZES, job_id="job-refused")
        case _:
            report = {"time": 6.0, "energy": 600.0, "metric": 0.5, "current_epoch": 3}
            return {**scene.running, **report}


def assert_refused(answer: httpx.Response, status: int, field: str) -> None:
    wire.assert_refused(answer, status, field)
    assert len(answer.content) < LONGEST_ANSWER


def with_token(body: dict[str, Any], field: str, token: str) -> bytes:
    """Return the body as JSON with a field replaced by the raw text `token`, whether or not valid JSON."""
    rest = json.dumps({name: value for name, value in body.items() if name != field})
    return f'{rest[:-1]}, "{field}": {token}}}'.encode()


# Spellings of numbers outside JSON by Python's json, by other encoders, and as strings.
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', '"Infinity"', '"-Infinity"']
# Both parsers of integers refuse this number.
HUGE = "9" * 5000


def no_numbers(*fields: str) -> list[tuple[str, str, str]]:
    return [(field, token, field) for field in fields for token in NO_NUMBERS]


def test_change_of_the_database_is_noticed(scene: Scene) -> None:
    """Check that the tests below would notice a change."""
    before = scene.stored()
    register(scene.http)
    after = scene.stored()
    assert before != after == scene.stored()


def rows(*table: tuple[str, str, str]) -> Any:
    """Parametrize a test by (field, JSON, name of the invalid field)."""
    ids = [f"{field}={token if len(token) <= 40 else f'{token[:20]}…'}" for field, token, _ in table]
    return pytest.mark.parametrize(
        ("field", "token", "named"), table, ids=[it.encode("unicode_escape").decode() for it in ids]
    )


# --- POST /jobs -------------------------------------------------------------------------------------------------------

JOB_FLOATS = ["eta_knob", "beta_knob", "target_metric", "mab_prior_mean", "mab_prior_precision", "max_power"]
JOB_INTEGERS = ["default_batch_size", "max_epochs", "num_pruning_rounds", "window_size", "mab_seed", "number_of_gpus"]


@rows(
    *no_numbers(*JOB_FLOATS, *JOB_INTEGERS),
    ("batch_sizes", "[]", "batch_sizes"),
    ("batch_sizes", "[16, 16]", "batch_sizes"),
    ("batch_sizes", "[0, 16]", "batch_sizes.0"),
    ("batch_sizes", "[8.5, 16]", "batch_sizes.0"),
    ("batch_sizes", f"[16, {2**31}]", "batch_sizes.1"),
    ("batch_sizes", f"[16, {10**400}]", "batch_sizes.1"),
    ("batch_sizes", json.dumps(list(range(1, 1002))), "batch_sizes"),
    ("batch_sizes", json.dumps([0] * 100_000), "batch_sizes.0"),
    ("batch_sizes", '"16"', "batch_sizes"),
    ("default_batch_size", "64", "default_batch_size"),
    ("default_batch_size", "0", "default_batch_size"),
    ("eta_knob", "1.1", "eta_knob"),
    ("beta_knob", "0", "beta_knob"),
    ("max_epochs", "0", "max_epochs"),
    ("num_pruning_rounds", "-1", "num_pruning_rounds"),
    ("window_size", "-1", "window_size"),
    ("mab_prior_precision", "-1", "mab_prior_precision"),
    ("mab_num_explorations", "-1", "mab_num_explorations"),
    ("mab_seed", "-1", "mab_seed"),
    ("mab_seed", str(2**63), "mab_seed"),
    ("max_power", "0", "max_power"),
    ("number_of_gpus", "0", "number_of_gpus"),
    ("gpu_model", '""', "gpu_model"),
    ("gpu_model", '"V100\\u0000"', "gpu_model"),
    ("gpu_model", '"\\ud800"', "gpu_model"),
    ("gpu_model", json.dumps("x" * 256), "gpu_model"),
    ("policy", '"guess"', "policy"),
    ("job_id", '"other-1"', "job_id"),
)
def test_invalid_field_of_a_job_is_refused(scene: Scene, field: str, token: str, named: str) -> None:
    body = with_token(job(**THREE_SIZES, job_id="job-refused"), field, token)
    with scene.nothing_stored():
        assert_refused(scene.http.post("/jobs", content=body, headers=JSON), 422, named)


def test_long_list_of_errors_is_truncated(scene: Scene) -> None:
    body = good_body(scene, "/report") | {"watched": {f"metric {number}": "high" for number in range(30)}}
    with scene.nothing_stored():
        answer = scene.http.post("/report", json=body)
        assert_refused(answer, 422, "watched.metric 0")
    assert len(answer.json()["errors"]) <= 20


@pytest.mark.parametrize(
    "gpu_model",
    ["NVIDIA RTX 6000 Ada Generation (Laptop, 175 W) x8", "x" * 255, "quotes \"' and \\", "型号 😀"],
    ids=["49 characters", "255 characters", "quotes", "not ASCII"],
)
def test_names_of_gpus_may_contain_any_printable_text(http: httpx.Client, gpu_model: str) -> None:
    job_id = register(http, gpu_model=gpu_model)
    assert http.get(f"/api/jobs/{job_id}").json()["job"]["gpu_model"] == gpu_model


# --- POST /report -----------------------------------------------------------------------------------------------------


@rows(
    *no_numbers("time", "energy", "metric", "current_epoch", "batch_size", "trial_number"),
    ("time", "0", "time"),
    ("time", "1e11", "time"),
    ("time", "null", "time"),
    ("time", HUGE, "body"),
    ("energy", "-1", "energy"),
    ("energy", "1e16", "energy"),
    ("metric", "null", "metric"),
    ("metric", '"good"', "metric"),
    ("current_epoch", "0", "current_epoch"),
    ("current_epoch", str(2**31), "current_epoch"),
    ("energy_source", '"nv\\u0000ml"', "energy_source"),
    ("energy_source", '"\\ud800"', "energy_source"),
    ("power_limit_w", "0", "power_limit_w"),
    ("power_limit_w", "1e300", "power_limit_w"),
    ("power_limits", "0", "power_limits"),
    ("power_limits", str(2**31), "power_limits"),
    ("trial_number", "0", "trial_number"),
    ("trial_number", str(2**63), "trial_number"),
    ("batch_size", "16.5", "batch_size"),
    # The trial's second report had 4 s, 400 J and 2 epochs.
    ("time", "3.9", "time"),
    ("energy", "399", "energy"),
    ("current_epoch", "1", "current_epoch"),
    ("current_epoch", "2.5", "current_epoch"),
)
def test_invalid_field_of_a_report_is_refused(scene: Scene, field: str, token: str, named: str) -> None:
    # Sent by our client: Zeus's client does not state its energy source, and its ranks may report out of order.
    good = {"time": 6.0, "energy": 600.0, "metric": 0.5, "current_epoch": 3, "energy_source": None}
    body = with_token({**scene.running, **good}, field, token)
    with scene.nothing_stored():
        status = 400 if named == "body" else 422
        assert_refused(scene.http.post("/report", content=body, headers=JSON), status, named)


METRICS = [(1.0, -3.5), (2.0, 0.0), (3.0, -1e300), (4.0, 5e-324)]
PACES: list[tuple[float, ...]] = [(0.5, 1, 1.5, 2, 2.5), (0.3, 0.6, 0.9, 1.3), (1.5, 3, 4.5), (2, 4, 6)]


@pytest.mark.parametrize("reports", [METRICS, *([(epoch, 0.5) for epoch in epochs] for epochs in PACES)])
def test_any_finite_number_is_a_metric_at_any_pace(http: httpx.Client, reports: list[tuple[float, float]]) -> None:
    trial = begin(http, register(http))
    for epoch, metric in reports:
        report = {**trial, "time": epoch, "energy": 100 * epoch, "metric": metric, "current_epoch": epoch}
        assert http.post("/report", json=report).status_code == 200
    path = f"/ui/jobs/{trial['job_id']}/trials/{trial['trial_number']}.json"
    assert [(each["epoch"], each["metric"]) for each in http.get(path).json()["epochs"]] == reports


@pytest.mark.parametrize("path", ["/report", "/trials", "/trials/heartbeat"])
@pytest.mark.parametrize(
    ("wrong", "status", "named"),
    [
        ({"trial_number": 3}, 404, "trial_number"),
        ({"job_id": "the other"}, 404, "trial_number"),
        ({"job_id": "job-unknown"}, 404, "trial_number"),
        ({"batch_size": 8}, 422, "batch_size"),
        ({"job_id": "the other", "trial_number": 1, "batch_size": 8}, 422, "batch_size"),
    ],
    ids=["no such trial", "a trial of another job", "no such job", "another size", "another job's, another size"],
)
def test_mismatched_trial_is_refused(scene: Scene, path: str, wrong: dict[str, Any], status: int, named: str) -> None:
    body = {**scene.running, **scene.reported, **wrong}
    if body["job_id"] == "the other":
        body["job_id"] = scene.other_job
    method = "POST" if path == "/report" else "PATCH"
    with scene.nothing_stored():
        assert_refused(scene.http.request(method, path, json=body), status, named)


@pytest.mark.parametrize(
    "other",
    [{"time": 9.0}, {"energy": 501.0}, {"metric": 0.96}, {"current_epoch": 3}],
    ids=lambda other: next(iter(other)),
)
def test_ended_trial_refuses_a_different_report(scene: Scene, other: dict[str, float]) -> None:
    with scene.nothing_stored():
        answer = scene.http.post("/report", json={**scene.ended, **scene.final, **other, "energy_source": None})
        assert_refused(answer, 409, "trial_number")
        # Zeus's client does not state its energy source and reports from every rank.
        of_zeus = scene.http.post("/report", json={**scene.ended, **scene.final, **other})
    told = of_zeus.json()
    assert (of_zeus.status_code, told.pop("message")) == (
        200,
        f"the end of trial 1 is already reported. It was: {scene.verdict['message']}",
    )
    assert told == {name: value for name, value in scene.verdict.items() if name != "message"}
    assert "trial 1 has ended (completed)" in answer.json()["message"]


@pytest.mark.parametrize(
    ("eta_knob", "spent", "named"),
    [
        (0.5, {"time": 0, "energy": 0}, "time"),
        (0.0, {"time": 0, "energy": 500}, "time"),
        (1.0, {"time": 5, "energy": 0}, "energy"),
    ],
    ids=["nothing at all", "no time where time counts", "no energy where energy counts"],
)
def test_target_reached_at_no_cost_is_refused(
    scene: Scene, eta_knob: float, spent: dict[str, float], named: str
) -> None:
    job_id = register(scene.http, eta_knob=eta_knob)
    trial = begin(scene.http, job_id)
    before = scene.http.get(f"/api/jobs/{job_id}/export").text
    answer = scene.http.post("/report", json={**trial, "metric": 0.95, "current_epoch": 1, **spent})
    assert_refused(answer, 422, named)
    assert scene.http.get(f"/api/jobs/{job_id}/export").text == before
    assert scene.http.get(f"/api/jobs/{job_id}").json()["min_cost_j"] is None


# --- Ids --------------------------------------------------------------------------------------------------------------

# As JSON, and percent-encoded in a URL.
WRONG_IDS = {
    "empty": ('""', ""),
    "256 characters": (json.dumps("job" + "x" * 253), "job" + "x" * 253),
    "10,000 characters": (json.dumps("job" + "x" * 9_997), "job" + "x" * 9_997),
    "NUL": ('"job\\u0000"', "job%00"),
    "newline": ('"job\\n"', "job%0A"),
    "newline within": ('"job\\nx"', "job%0Ax"),
    "space": ('"job 1"', "job%201"),
    "double quotes": ('"job\\""', "job%22"),
    "single quotes": ('"job\'"', "job%27"),
    "slash": ('"job/1"', "job%2F1"),
    "emoji": ('"job\\ud83d\\ude00"', "job%F0%9F%98%80"),
    "lone surrogate": ('"job\\ud800"', "job%ED%A0%80"),
    "no UTF-8": (None, "job%FF"),
    "number": ("1", None),
    "null": ("null", None),
    "absent": (None, None),
}
IN_JSON = {name: token for name, (token, _) in WRONG_IDS.items() if token is not None}
IN_URL = {name: part for name, (_, part) in WRONG_IDS.items() if part is not None}


@pytest.mark.parametrize(
    ("field", "token"),
    [
        pytest.param(field, token, id=f"{field}-{name}")
        for field in ("job_id", "job_id_prefix")
        for name, token in IN_JSON.items()
        if (field, name) != ("job_id", "null")  # the server makes an id
    ],
)
def test_invalid_job_id_is_refused_at_registration(scene: Scene, field: str, token: str) -> None:
    body = with_token(job(**THREE_SIZES, job_id="job-refused"), field, token)
    with scene.nothing_stored():
        assert_refused(scene.http.post("/jobs", content=body, headers=JSON), 422, field)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/report"), ("PATCH", "/trials"), ("PATCH", "/trials/heartbeat")],
)
@pytest.mark.parametrize("token", [pytest.param(token, id=name) for name, token in IN_JSON.items()])
def test_invalid_job_id_of_a_trial_is_refused(scene: Scene, method: str, path: str, token: str) -> None:
    body = with_token({**scene.running, **scene.reported}, "job_id", token)
    with scene.nothing_stored():
        assert_refused(scene.http.request(method, path, content=body, headers=JSON), 422, "job_id")


@pytest.mark.parametrize(("method", "path"), [("GET", "/jobs/batch_size"), ("DELETE", "/jobs")])
@pytest.mark.parametrize("query", [*(pytest.param(f"?job_id={it}", id=name) for name, it in IN_URL.items()), ""])
def test_invalid_job_id_in_a_query_is_refused(scene: Scene, method: str, path: str, query: str) -> None:
    with scene.nothing_stored():
        answer = scene.http.request(method, path + query)
        if len(query) > MOST_HEAD_BYTES:
            assert answer.status_code == 400
        else:
            assert_refused(answer, 422, "job_id")


# --- Idempotency-Key --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [b"", b"x" * 256, b"x" * 10_000, b"a b", b"a\tb", "é".encode("latin-1"), "😀".encode(), b"\xed\xa0\x80"],
    ids=["empty", "256 characters", "10,000 characters", "space", "tab", "Latin-1", "emoji", "lone surrogate"],
)
def test_invalid_idempotency_key_is_refused(scene: Scene, key: bytes) -> None:
    with scene.nothing_stored():
        answer = scene.http.get(
            "/jobs/batch_size", params={"job_id": scene.other_job}, headers={b"Idempotency-Key": key}
        )
        assert_refused(answer, 422, "Idempotency-Key")


# --- Trials that began without the server -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "key", "status", "named"),
    [
        ({}, None, 422, "Idempotency-Key"),
        ({}, "", 422, "Idempotency-Key"),
        ({"job_id": "job-unknown"}, "key", 404, "job_id"),
        ({"job_id": "a b"}, "key", 422, "job_id"),
        ({"batch_size": 7}, "key", 422, "batch_size"),
        ({"batch_size": 0}, "key", 422, "batch_size"),
    ],
)
def test_invalid_offline_trial_is_refused(
    scene: Scene, body: dict[str, Any], key: str | None, status: int, named: str
) -> None:
    headers = {} if key is None else {"Idempotency-Key": key}
    with scene.nothing_stored():
        body = {"job_id": scene.other_job, "batch_size": 8, **body}
        assert_refused(scene.http.post("/trials", json=body, headers=headers), status, named)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ({}, "judged_by.max_epochs"),
        ({"max_epochs": 0}, "judged_by.max_epochs"),
        ({"max_epochs": 2.5}, "judged_by.max_epochs"),
        ({"max_epochs": 3, "max_cost_j": -1}, "judged_by.max_cost_j"),
        ([], "judged_by"),
    ],
)
def test_invalid_stop_rule_is_refused(scene: Scene, rule: Any, named: str) -> None:
    with scene.nothing_stored():
        body = {**scene.running, **scene.reported, "judged_by": rule}
        assert_refused(scene.http.post("/report", json=body), 422, named)


# --- Valid keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["x" * 255, '"quoted"', "';DROP/**/TABLE/**/trials;--", "%00", "\\"],
    ids=["255 characters", "quotes", "SQL", "percent", "backslash"],
)
def test_unusual_idempotency_key_is_accepted(http: httpx.Client, key: str) -> None:
    job_id = register(http)
    answers = [
        http.get("/jobs/batch_size", params={"job_id": job_id}, headers={"Idempotency-Key": key}).json()
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert answers[0]["trial_number"] == 1


# --- Bodies that every route refuses: no JSON, another media type, or far too large -----------------------------------


# --- Bodies -----------------------------------------------------------------------------------------------------------

WITH_BODY = [
    ("POST", "/jobs"),
    ("POST", "/report"),
    ("PATCH", "/trials"),
    ("PATCH", "/trials/heartbeat"),
]
with_body = pytest.mark.parametrize(
    ("method", "path"), WITH_BODY, ids=[f"{method} {path}" for method, path in WITH_BODY]
)


NO_OBJECTS = {
    "cut off": (b"{", 400),
    "a word": (b"job", 400),
    "no value": (b'{"job_id": }', 400),
    "no UTF-8": (b'{"gpu_model": "\xff"}', 400),
    "UTF-16": ('{"job_id": "job"}'.encode("utf-16"), 400),
    "deep lists": (b"[" * 100_000, 400),
    "deep objects": (b'{"colour": ' * 50_000, 400),
    "an endless number": (b'{"mab_seed": ' + HUGE.encode() + b"}", 400),
    "empty": (b"", 422),
    "a list": (b"[]", 422),
    "null": (b"null", 422),
    "a string": (b'"job"', 422),
}


@with_body
@pytest.mark.parametrize(("body", "status"), NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_body_without_an_object_is_refused(scene: Scene, method: str, path: str, body: bytes, status: int) -> None:
    with scene.nothing_stored():
        assert_refused(scene.http.request(method, path, content=body, headers=JSON), status, "body")


FOREIGN_TYPES = pytest.mark.parametrize(
    "media_type",
    [
        *("text/plain", "text/plain; charset=utf-8", "multipart/form-data; boundary=x"),
        *("application/x-www-form-urlencoded", "application/xml", "application/jsonp", "json"),
    ],
)


@with_body
@FOREIGN_TYPES
def test_json_with_a_foreign_media_type_is_refused(scene: Scene, method: str, path: str, media_type: str) -> None:
    body = json.dumps(good_body(scene, path))
    with scene.nothing_stored():
        answer = scene.http.request(method, path, content=body, headers={"content-type": media_type})
        assert_refused(answer, 415, "Content-Type")


@pytest.mark.parametrize(
    "media_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x.bso+json"]
)
def test_json_media_type_has_several_spellings(scene: Scene, media_type: str) -> None:
    body = json.dumps(job(**THREE_SIZES))
    assert scene.http.post("/jobs", content=body, headers={"content-type": media_type}).status_code == 201


def test_body_without_a_media_type_is_read_as_json(scene: Scene) -> None:
    """Zeus's clients send no media type."""
    content = json.dumps(job(**THREE_SIZES))
    request = scene.http.build_request("POST", "/jobs", content=content)
    assert "content-type" not in request.headers
    assert scene.http.send(request).status_code == 201


@pytest.mark.parametrize("token", ["NaN", "-Infinity", "1e999", '"\\ud800"', "[[[[]]]]"])
def test_values_of_unknown_fields_are_ignored(scene: Scene, token: str) -> None:
    body = with_token(job(**THREE_SIZES), "colour", token)
    assert scene.http.post("/jobs", content=body, headers=JSON).status_code == 201


def test_last_value_of_a_repeated_key_counts(scene: Scene) -> None:
    twice = json.dumps(job(**THREE_SIZES, eta_knob=0.1))
    answer = scene.http.post("/jobs", content=f'{twice[:-1]}, "eta_knob": 0.2}}', headers=JSON)
    assert (answer.status_code, answer.json()["eta_knob"]) == (201, 0.2)


@pytest.mark.parametrize("token", NO_NUMBERS)
@pytest.mark.parametrize(
    "place", ["1, created_at", "1, version", "1, job.max_power", "2, time_s", "2, batch_size", "3, epochs.0.metric"]
)
def test_import_with_a_token_instead_of_a_number_is_refused(scene: Scene, place: str, token: str) -> None:
    export = renamed(export_over(scene.http, scene.running["job_id"]), "job-refused")
    line, _, field = place.partition(", ")
    parent: Any = export[int(line) - 1]
    *parents, last = field.split(".")
    for key in parents:
        parent = parent[int(key) if key.isdigit() else key]
    parent[last] = "the place"
    body = encoded(export).replace(b'"the place"', token.encode())
    with scene.nothing_stored(), pytest.raises(InvalidImportError) as refused:
        import_beside(scene.http, body)
    assert refused.value.field == f"line {place}"


# --- Memory -----------------------------------------------------------------------------------------------------------

MIB = 1024 * 1024

in_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")


def forget_peak(server: ServerProcess) -> None:
    assert server.process is not None
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")


@in_proc
def test_body_with_100_000_errors_needs_little_memory(shared_server: ServerProcess, scene: Scene) -> None:
    sizes = job(job_id="job-refused", batch_sizes=[0] * 100_000)
    forget_peak(shared_server)
    before = memory_of(shared_server, "VmRSS")
    assert_refused(scene.http.post("/jobs", json=sizes), 422, "batch_sizes.0")
    assert memory_of(shared_server, "VmHWM") - before < 30 * MIB
