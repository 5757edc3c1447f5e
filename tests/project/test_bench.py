"""Load on servers: the requested load is sent, and figures of a process are true. No timings here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fleet_load
from benchmarks.__main__ import judge
from benchmarks.__main__ import main as bench
from benchmarks.driver import RequestFigures, encode, parse_answer, percentile
from benchmarks.fleet_load import FleetFigures
from benchmarks.processes import BenchmarkError, Meter, Target
from benchmarks.whole_trials import Shape, TrialFigures, play_trials
from tests.support.servers import ServerProcess
from tests.zeus_peer.peer import Peer

HEARTBEAT = "PATCH /trials/heartbeat"


def answers(figures: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {kind["request"]: kind["answers"] for kind in figures["kinds"]}


@pytest.mark.slow
def test_quick_run_sends_the_requested_load_and_applies_the_gate(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del peer  # installed for the command
    file = tmp_path / "figures.json"
    assert bench(["--quick", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert set(answers(results["fleet"])) >= {HEARTBEAT, "POST /report (epoch)"}
    # 2 jobs × 4 trials × 5 epochs; each trial registers the job once, and Zeus gives the same answer each time.
    for server, registered in zip(
        results["whole_trials"], ({"200": 6, "201": 2}, {"200": 6, "201": 2}, None), strict=True
    ):
        found = answers(server)
        assert server["requests"] == 2 * 4 * (2 + 5)
        assert registered is None or found["POST /jobs"] == registered
        assert found["GET /jobs/batch_size"] == found["POST /report (final)"] == {"200": 8}
        assert found["POST /report (epoch)"] == {"200": 32}
        assert (server["cpu_ms"] is not None) == sys.platform.startswith("linux")
    shown = capsys.readouterr().out
    assert [row[1] for row in results["gate"]] == ["≤ 0.35", "≤ 50", "≤ 0", "≥ 3.2"]
    for text in ("bso-server, aiosqlite", "Zeus 0.16", *(row[0] for row in results["gate"])):
        assert text in shown


def test_gate_compares_servers_of_the_same_run() -> None:
    def judged(cores: float | None, p99_ms: float, failures: int, zeus_ms: float | None) -> list[list[str]]:
        heartbeat = RequestFigures(HEARTBEAT, 9, {"200": 9 - failures, "0": failures}, 1.0, p99_ms)
        fleet = FleetFigures(45.0, 1.0, cores, 0.1, 90.0, (heartbeat,))
        servers = [
            TrialFigures(name, 9, 9.0, ms, 90.0, ()) for name, ms in (("bso-server", 1.0), ("Zeus 0.16", zeus_ms))
        ]
        return [row[2:] for row in judge(fleet, servers)]

    met = [["0.35", "met"], ["50", "met"], ["0", "met"], ["3.2", "met"]]
    assert judged(0.35, 50.0, 0, 3.2) == met
    missed = [["0.36", "not met"], ["50.1", "not met"], ["1", "not met"], ["3.1", "not met"]]
    assert judged(0.36, 50.1, 1, 3.1) == missed
    assert [row[1] for row in judged(None, 50.0, 0, None)] == ["not known", "met", "met", "not known"]


async def test_unsuccessful_answer_ends_the_run(server: ServerProcess) -> None:
    target = Target("server", "127.0.0.1", server.port, Meter(1))
    with pytest.raises(BenchmarkError, match=r"server answered 422 to POST /jobs: .*max_epochs"):
        await play_trials([target], Shape(jobs=1, in_flight=1, trials=1, epochs=-1), "none")


def test_request_is_encoded_completely() -> None:
    assert encode("GET", "/jobs/batch_size?job_id=a").endswith(b"\r\n\r\n")
    head, _, body = encode("POST", "/jobs", {"job_id": "ä"}).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head


def test_answer_may_arrive_in_pieces() -> None:
    answer = b"HTTP/1.1 201 Created\r\nServer: x\r\ncontent-length: 2\r\n\r\n{}"
    assert [parse_answer(bytearray(answer[:end])) for end in range(len(answer))] == [None] * len(answer)
    assert parse_answer(bytearray(answer)) == (201, b"{}")
    assert parse_answer(bytearray(b"HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n")) == (204, b"")
    with pytest.raises(BenchmarkError, match="without Content-Length"):
        parse_answer(bytearray(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the figures come from /proc")
def test_meter_counts_a_process_and_all_children() -> None:
    child = "import time\nwhile time.process_time() < 0.2: pass\nprint(time.process_time(), flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        used_by_child_s = float(process.stdout.readline())
        meter = Meter(process.pid)
        cpu_s, rss_mib = meter.cpu_s(), meter.rss_mib()
        process.stdin.write(b"\n")
    assert cpu_s is not None
    assert cpu_s > used_by_child_s
    assert rss_mib is not None
    assert 2 < rss_mib < 1000


def test_percentiles_are_measured_values() -> None:
    hundred = list(range(1, 101))
    assert [percentile(hundred, share) for share in (0.50, 0.95, 0.99)] == [50, 95, 99]
    assert percentile([7.0], 0.5) == 7.0
    assert percentile([1.0, 2.0], 0.99) == 2.0


@pytest.mark.slow
def test_fleet_reports_and_sends_heartbeats_at_the_set_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    pace = "--trainings 20 --per-job 4 --epochs 3 --epoch-s 2 --heartbeat-s 1 --seconds 6"
    assert fleet_load.main([*pace.split(), "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    # Each training sends six heartbeats in six seconds and reports three times, the last report being final.
    assert answers(figures) == {
        HEARTBEAT: {"200": 120},
        "POST /report (epoch)": {"200": 40},
        "POST /report (final)": {"200": 20},
        "POST /jobs": {"200": 20},
        "GET /jobs/batch_size": {"200": 20},
    }
    assert (figures["rows"]["trials"], figures["rows"]["epochs"]) == (40, 40)
    assert "0 without success" in capsys.readouterr().out
