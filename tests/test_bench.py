"""The load generator: what was asked is what was sent, and what it says about a process is true. No timings here."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import fleet_load
from benchmarks.driver import driving, percentile
from benchmarks.errors import BenchmarkError
from benchmarks.marks import overhead_mark
from benchmarks.overhead import OverheadFigures, Ratio, figures_of
from benchmarks.player import encode, parse_answer
from benchmarks.processes import Meter, Target
from benchmarks.trainings import Duration
from tests.support.servers import Server, free_port

ROOT = Path(__file__).parent.parent

JOBS, CONCURRENCY, EPOCHS, ROUNDS = 2, 3, 4, 2
CLIENTS = JOBS * CONCURRENCY


def asked(jobs: int, clients: int) -> dict[str, dict[str, int]]:
    """Answers per status and route that a load must bring about: all of them 2xx."""
    trials = clients * ROUNDS
    return {
        "POST /jobs (new)": {"201": jobs},
        "POST /jobs (known)": {"200": trials},
        "GET /jobs/batch_size": {"200": trials + clients},
        "POST /report (epoch)": {"200": trials * (EPOCHS - 1)},
        "POST /report (final)": {"200": trials},
        "PATCH /trials": {"200": clients},
        "DELETE /jobs": {"200": jobs},
    }


def answers(figures: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {route["route"]: route["answers"] for route in figures["routes"]}


@pytest.mark.slow
def test_a_quick_run_sends_what_was_asked_and_writes_all_figures(tmp_path: Path) -> None:
    shape = f"--jobs {JOBS} --concurrency {CONCURRENCY} --epochs {EPOCHS} --rounds {ROUNDS}".split()
    nobody = f"http://127.0.0.1:{free_port()}"
    file = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", *shape, "--peer-url", nobody, "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(file.read_text())

    server, bare = results["load"]
    assert (server["target"], server["clients"], server["rounds"]) == ("bso-server", CLIENTS, ROUNDS)
    assert answers(server) == asked(JOBS, CLIENTS)
    assert answers(bare) == {"POST /report (echo)": {"200": CLIENTS * ROUNDS * (EPOCHS - 1)}}
    one_client, bare_with_one = results["one_client"]
    assert answers(one_client) == asked(jobs=1, clients=1)
    assert answers(bare_with_one) == {"POST /report (echo)": {"200": ROUNDS * (EPOCHS - 1)}}
    for figures in (*results["load"], *results["one_client"]):
        for route in figures["routes"]:
            assert route["requests"] == sum(route["answers"].values())
            assert 0 < route["p50_ms"] <= route["p95_ms"] <= route["p99_ms"]
            assert route["requests_per_s"] > 0
            assert (route["server_cpu_ms"] is not None) == sys.platform.startswith("linux")
            if route["server_cpu_ms"] is not None:
                assert 0 < route["least_cpu_ms"] <= route["server_cpu_ms"]

    assert results["growth"]["note"] is None
    assert [(point["trials"], point["requests"]) for point in results["growth"]["points"]] == [(10, 10), (40, 10)]
    assert results["database"] == "sqlite"
    assert results["peer"]["skipped"].startswith(f"no server at {nobody.removeprefix('http://')}")
    assert "SQLite" in results["workers"]["skipped"]
    in_threads, aiosqlite = results["drivers"]
    assert (in_threads["target"], aiosqlite["target"]) == ("in threads", "aiosqlite")
    assert answers(in_threads) == answers(aiosqlite) == asked(JOBS, CLIENTS)
    assert ("aiosqlite / in threads" in run.stdout) == sys.platform.startswith("linux")
    assert list(results["overhead"]) == ["Lightning", "Hugging Face"]
    for overhead in results["overhead"].values():
        # Of five epochs, the first and the last do not count, and the last that counts has no epoch after it. Trainings
        # end early on a machine that is too slow for five.
        assert (overhead["epochs"] in (1, 2), overhead["steps"]) == (True, 10)
        assert min(overhead["without_ms"], overhead["with_ms"], overhead["report_ms"]) > 0
        assert overhead["wall"]["error"] >= 0
    assert answers(results["gp_voi"]) == asked(JOBS, CLIENTS)
    assert "--beside" in results["databases"]["skipped"]
    assert results["watching"]["blocks"] == 1
    starts = results["starts"]
    assert starts["times"] == 1
    assert min(starts["server_s"], starts["embedded_s"], starts["embedded_imports_s"]) > 0
    assert results["pages"]["jobs"] == 60
    under_load = ["≤ 1.7", "≥ 0.55", "≤ 10", "≤ 10", "≤ 3", "≤ 3.5"]
    pages = ["≤ 30", "≤ 150", "≤ 50", "≤ 3", "≤ 3"]
    starting, watching, overhead = ["≤ 0.8", "≤ 0.3"], ["≤ 0.02", "≤ 0.02"], ["≤ 1.01", "≤ 1.01"]
    growth = ["≤ 1.2", "≤ 1.2", *pages[:2]]
    limits = [*under_load, *growth, "≤ 1.3", *pages[2:], "≥ 1", *starting, *watching, *overhead]
    assert [mark["limit"] for mark in results["marks"]] == limits
    assert all(mark["what"] in run.stdout and mark["outcome"] in run.stdout for mark in results["marks"])
    assert all(mark["outcome"].startswith("not judged") for mark in results["marks"])


def test_an_answer_that_is_no_success_ends_the_run(server: Server) -> None:
    async def ask_for_nothing() -> None:
        async with driving(Target("server", "127.0.0.1", server.port, Meter(None)), clients=1) as driver:
            await driver.send([[encode("GET", "/health/live"), encode("GET", "/jobs/batch_size?job_id=nobody")]])

    with pytest.raises(BenchmarkError, match=r"server answered 404 to GET /jobs/batch_size.*nobody"):
        asyncio.run(ask_for_nothing())


def test_an_answer_may_arrive_in_pieces() -> None:
    answer = b"HTTP/1.1 201 Created\r\nServer: x\r\ncontent-length: 2\r\n\r\n{}"
    assert [parse_answer(bytearray(answer[:end])) for end in range(len(answer))] == [None] * len(answer)
    assert parse_answer(bytearray(answer)) == (201, b"{}")
    assert parse_answer(bytearray(b"HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n")) == (204, b"")
    with pytest.raises(BenchmarkError, match="without Content-Length"):
        parse_answer(bytearray(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the figures come from /proc")
def test_the_meter_counts_a_process_and_its_children() -> None:
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


def test_percentiles_are_values_that_were_measured() -> None:
    hundred = list(range(1, 101))
    assert [percentile(hundred, share) for share in (0.50, 0.95, 0.99)] == [50, 95, 99]
    assert percentile([7.0], 0.5) == 7.0
    assert percentile([1.0, 2.0], 0.99) == 2.0


def test_the_overhead_is_a_ratio_to_the_epochs_around_without_the_report() -> None:
    def durations(*wall_s: float) -> list[Duration]:
        return [Duration(each, each / 2) for each in wall_s]

    # A machine that gets slower: with the callback, 2 % more than the mean of the epochs around, and a report.
    figures = figures_of(400, durations(1.0, 3.0, 5.0), durations(2.54, 4.58, 9.9), durations(0.5, 0.5, 7.0))
    assert (figures.epochs, figures.steps) == (2, 400)
    assert figures.wall.median == pytest.approx(1.02)
    assert figures.cpu.median == pytest.approx(1.02)
    assert figures.wall.error == pytest.approx(0.0)
    assert (figures.without_ms, figures.with_ms, figures.report_ms) == pytest.approx((3000, 4580, 500))


def test_the_error_of_a_ratio_is_that_of_the_median_of_normal_values() -> None:
    draws = np.random.default_rng(0).normal(1.0, 0.1, size=(2000, 101))
    ratios = [figures_of(1, *_pairs_with(row), [Duration(0.0, 0.0)]).wall for row in draws]
    medians = [ratio.median for ratio in ratios]
    assert np.mean([ratio.error for ratio in ratios]) == pytest.approx(np.std(medians), rel=0.05)


def _pairs_with(ratios: Sequence[float]) -> tuple[list[Duration], list[Duration]]:
    return [Duration(1.0, 1.0)] * (len(ratios) + 1), [Duration(ratio, ratio) for ratio in ratios]


@pytest.mark.parametrize(
    ("median", "error", "epochs", "outcome"),
    [
        (1.009, 0.002, 58, "met"),
        (1.02, 0.002, 58, "not met"),
        (1.02, 0.002, 19, "not judged: 19 epochs"),
        (1.02, 0.02, 58, "not judged: the machine is too restless, ± 0.020"),
    ],
)
def test_the_overhead_is_judged_where_it_is_known(median: float, error: float, epochs: int, outcome: str) -> None:
    ratio = Ratio(median, error)
    mark = overhead_mark("Lightning", OverheadFigures(epochs, 400, 100.0, 101.0, 1.0, wall=ratio, cpu=ratio))
    assert (mark.measured, mark.outcome) == (median, outcome)


@pytest.mark.slow
def test_a_fleet_reports_and_beats_at_its_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    pace = "--trainings 20 --per-job 4 --epochs 3 --epoch-s 2 --heartbeat-s 1 --seconds 6"
    assert fleet_load.main([*pace.split(), "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    kinds = {kind["request"]: kind for kind in figures["figures"]["kinds"]}
    # Each beats six times in six seconds and reports three times, once of these for the last time.
    assert kinds["PATCH /trials/heartbeat"]["answers"] == {"200": 120}
    assert kinds["POST /report (epoch)"]["due"] == 40
    assert {name: kind["answers"] for name, kind in kinds.items() if "heartbeat" not in name} == {
        "POST /report (epoch)": {"200": 40},
        "POST /report (final)": {"200": 20},
        "POST /jobs (known)": {"200": 20},
        "GET /jobs/batch_size": {"200": 20},
    }
    assert (figures["database"]["trials"], figures["database"]["epochs"]) == (40, 40)
    assert "0 without success" in capsys.readouterr().out
