"""Bodies that every route refuses: no JSON, another media type, or far too large."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.exports import encoded, export_over, import_over, renamed
from tests.support.input_scene import HUGE, JSON, NO_NUMBERS, Scene, assert_refused, good_body, memory_of, with_token
from tests.support.jobs import THREE_SIZES, job
from tests.support.servers import ServerProcess

# --- Bodies -----------------------------------------------------------------------------------------------------------

WITH_BODY = [
    ("POST", "/jobs"),
    ("POST", "/report"),
    ("PATCH", "/trials"),
    ("PATCH", "/trials/heartbeat"),
    ("PUT", "/trials/power_profile"),
]
with_body = pytest.mark.parametrize(
    ("method", "path"), WITH_BODY, ids=[f"{method} {path}" for method, path in WITH_BODY]
)


NO_OBJECTS = {
    "cut off": (b"{", 400),
    "a word": (b"job", 400),
    "two objects": (b"{} {}", 400),
    "no value": (b'{"job_id": }', 400),
    "single quotes": (b"{\"job_id\": 'job'}", 400),
    "XML": (b"<job/>", 400),
    "no UTF-8": (b'{"gpu_model": "\xff"}', 400),
    "UTF-16": ('{"job_id": "job"}'.encode("utf-16"), 400),
    "deep lists": (b"[" * 100_000, 400),
    "deep objects": (b'{"colour": ' * 50_000, 400),
    "an endless number": (b'{"mab_seed": ' + HUGE.encode() + b"}", 400),
    "empty": (b"", 422),
    "a list": (b"[]", 422),
    "null": (b"null", 422),
    "a number": (b"3", 422),
    "NaN": (b"NaN", 422),
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


@FOREIGN_TYPES
def test_export_with_a_foreign_media_type_is_refused(scene: Scene, media_type: str) -> None:
    body = encoded(renamed(export_over(scene.http, scene.running["job_id"]), "job-refused"))
    with scene.nothing_stored():
        answer = scene.http.post("/api/import", content=body, headers={"content-type": media_type})
        assert_refused(answer, 415, "Content-Type")
        assert "application/jsonl" in answer.json()["message"]


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
    with scene.nothing_stored():
        assert_refused(import_over(scene.http, body), 422, f"line {place}")


# --- Memory -----------------------------------------------------------------------------------------------------------

MIB = 1024 * 1024

in_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")


def forget_peak(server: ServerProcess) -> None:
    assert server.process is not None
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")


def send_endless(server: ServerProcess, path: str, size: int, *, chunked: bool) -> httpx.Response:
    """Send a body of `size` bytes until the server hangs up, reading the answer at the same time."""
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    piece = b"x" * 65536
    framed = b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece

    def send() -> None:
        try:
            for _ in range(size // len(piece)):
                connection.sendall(framed)
        except OSError:
            return  # the server has hung up

    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
        connection.sendall(head.encode())
        sender = threading.Thread(target=send)
        sender.start()
        answer = b""
        while not answer.endswith(b"}"):
            received = connection.recv(65536)
            assert received, f"the server said no more than {answer!r}"
            answer += received
        sender.join()
    told, body = answer.split(b"\r\n\r\n", 1)
    status, *headers = told.decode().split("\r\n")
    return httpx.Response(int(status.split()[1]), headers=[tuple(it.split(": ", 1)) for it in headers], content=body)


@in_proc
@pytest.mark.slow
@pytest.mark.parametrize("path", ["/jobs", "/report"])
@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "in chunks"])
def test_body_of_100_mb_is_refused_with_little_memory(
    shared_server: ServerProcess, scene: Scene, path: str, chunked: bool
) -> None:
    with scene.nothing_stored():
        forget_peak(shared_server)
        before = memory_of(shared_server, "VmRSS")
        assert_refused(send_endless(shared_server, path, 100 * MIB, chunked=chunked), 413, "body")
        assert memory_of(shared_server, "VmHWM") - before < 30 * MIB


@in_proc
def test_body_with_100_000_errors_needs_little_memory(shared_server: ServerProcess, scene: Scene) -> None:
    sizes = job(job_id="job-refused", batch_sizes=[0] * 100_000)
    forget_peak(shared_server)
    before = memory_of(shared_server, "VmRSS")
    assert_refused(scene.http.post("/jobs", json=sizes), 422, "batch_sizes.0")
    assert memory_of(shared_server, "VmHWM") - before < 30 * MIB
