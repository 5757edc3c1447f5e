"""The OpenAPI document is complete, and the server matches the document for generated requests on each database.

``ZEUS_TEST_FUZZ_EXAMPLES`` sets the number of requests per route; by default, each run sends the same requests.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.jobs import job
from tests.support.servers import ServerProcess

ROUTES = [
    ("POST", "/jobs"),
    ("DELETE", "/jobs"),
    ("GET", "/jobs/batch_size"),
    ("POST", "/report"),
    ("POST", "/trials"),
    ("PATCH", "/trials"),
    ("PATCH", "/trials/heartbeat"),
    ("GET", "/api/jobs"),
    ("GET", "/api/report"),
    ("GET", "/api/jobs/{job_id}"),
    ("GET", "/api/jobs/{job_id}/trials"),
    ("POST", "/api/jobs/{job_id}/trials/{trial_number}/discard"),
    ("GET", "/api/jobs/{job_id}/explanation"),
    ("GET", "/api/jobs/{job_id}/export"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
# Nothing about these requests can be wrong.
WITHOUT_PARAMETERS = {"/health/live", "/health/ready", "/version", "/metrics"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


ASKED_EXAMPLES = os.environ.get("ZEUS_TEST_FUZZ_EXAMPLES")
VALID = int(ASKED_EXAMPLES or 20)
EXAMPLES = {GenerationMode.POSITIVE: VALID, GenerationMode.NEGATIVE: max(1, VALID // 2)}


@pytest.fixture(scope="module")
def document(shared_server: ServerProcess) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{shared_server.url}/schema/openapi.json")


def begun(server: ServerProcess) -> dict[str, Any]:
    """Return a trial with one report; its job also has an ended trial."""
    job_id = f"fuzz-{uuid.uuid4().hex[:8]}"
    with httpx.Client(base_url=server.url) as http:
        http.post("/jobs", json=job(job_id=job_id)).raise_for_status()
        for metric in (0.95, 0.5):
            trial = http.get("/jobs/batch_size", params={"job_id": job_id}).raise_for_status().json()
            result = {"time": 5, "energy": 500, "metric": metric, "current_epoch": 3}
            http.post("/report", json={**trial, **result}).raise_for_status()
    return {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}


def strategy(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, job_id: str) -> Any:
    """Generate requests of one route, half of them for this job if the route takes a job."""
    wanted: dict[str, Any] = {}
    if any(parameter.name == "job_id" for parameter in operation.path_parameters):
        wanted["path_parameters"] = {"job_id": job_id}
    if any(parameter.name == "job_id" for parameter in operation.query):
        wanted["query"] = {"job_id": job_id}
    cases = operation.as_strategy(mode)
    return cases | operation.as_strategy(mode, **wanted) if wanted else cases


def aimed(case: Case[Any], trial: dict[str, Any], aim: bool) -> Case[Any]:
    """Return the request without generated tokens, and with this trial in its body if `aim` is set."""
    for name in [name for name in case.headers if name.lower() == "authorization"]:
        del case.headers[name]
    if aim and isinstance(case.body, dict):
        case.body |= trial
    return case


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_generated_requests_get_documented_answers(
    any_server: ServerProcess, document: BaseSchema, method: str, path: str
) -> None:
    check_answers(any_server, document[path][method], GenerationMode.POSITIVE)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[1] not in WITHOUT_PARAMETERS])
def test_generated_invalid_requests_get_documented_answers(
    shared_server: ServerProcess, document: BaseSchema, method: str, path: str
) -> None:
    """On one database, because they are refused before any database is asked."""
    check_answers(shared_server, document[path][method], GenerationMode.NEGATIVE)


def check_answers(server: ServerProcess, operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode) -> None:
    open_trial = begun(server)
    with requests.Session() as session:

        @settings(
            max_examples=EXAMPLES[mode],
            deadline=None,
            derandomize=ASKED_EXAMPLES is None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy(operation, mode, open_trial["job_id"]), aim=st.booleans())
        def check(case: Case[Any], aim: bool) -> None:
            answer = aimed(case, open_trial, aim).call(base_url=server.url, session=session)
            case.validate_response(answer, checks=CHECKS)

        check()


def test_document_lists_every_route(document: BaseSchema) -> None:
    paths = document.raw_schema["paths"]
    routes = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert routes == {*ROUTES, ("HEAD", "/health/live"), ("HEAD", "/health/ready")}


def test_every_route_documents_purpose_and_errors(document: BaseSchema) -> None:
    for method, path in ROUTES:
        route = document.raw_schema["paths"][path][method.lower()]
        assert route["summary"], path
        assert route["description"], path
        for status, answer in route["responses"].items():
            if int(status) >= 400:
                assert set(answer["content"]) == {"application/problem+json"}, (path, status)


def test_constraints_inside_unions_are_documented(document: BaseSchema) -> None:
    schemas = document.raw_schema["components"]["schemas"]
    sizes = schemas["CreatedJob"]["properties"]["batch_sizes"]["items"]
    assert sizes == {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**31 - 1}
    seed = schemas["CreatedJob"]["properties"]["mab_seed"]["anyOf"]
    assert {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**63} in seed


def test_document_refers_to_no_external_resource(shared_server: ServerProcess) -> None:
    assert "://" not in httpx.get(f"{shared_server.url}/schema/openapi.json").text.replace("http://user", "")
