"""Load on a server: the requested load is sent, and figures of a process are true. No timings here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fleet_load, growth
from benchmarks.driver import HEARTBEAT, RequestFigures, encode, exchange, percentile
from benchmarks.fleet_load import FleetFigures, judge
from benchmarks.processes import BenchmarkError, Meter, Target
from bso_server.service.health import TotalsReader
from bso_server.service.verdicts import update_all
from tests.support.servers import ServerProcess, free_port
from tests.support.service import job_service
from zeus_plugins.protocol import GP_VOI, TrialState


def test_gate_holds_the_figures_against_the_limits() -> None:
    def judged(cores: float | None, p99_ms: float, failures: int) -> list[list[str]]:
        heartbeat = RequestFigures(HEARTBEAT, 9, {"200": 9 - failures, "0": failures}, 1.0, p99_ms)
        return [row[2:] for row in judge(FleetFigures(45.0, 1.0, cores, 0.1, 90.0, (heartbeat,)))]

    assert judged(0.40, 50.0, 0) == [["0.4", "met"], ["50", "met"], ["0", "met"]]
    assert judged(0.41, 50.1, 1) == [["0.41", "not met"], ["50.1", "not met"], ["1", "not met"]]
    assert judged(None, 50.0, 0)[0] == ["–", "not known"]


async def test_failing_server_is_an_error(server: ServerProcess) -> None:
    target = Target("127.0.0.1", server.port, Meter(1))
    assert (await exchange(target, encode("POST", "/jobs", {}))).status == 422
    with pytest.raises(BenchmarkError, match=r"no answer from 127\.0\.0\.1"):
        await exchange(Target("127.0.0.1", free_port(), Meter(1)), encode("GET", "/health"))


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
    assert {kind["request"]: kind["answers"] for kind in figures["kinds"]} == {
        HEARTBEAT: {"200": 120},
        "POST /report (epoch)": {"200": 40},
        "POST /report (final)": {"200": 20},
        "POST /jobs": {"200": 20},
        "GET /jobs/batch_size": {"200": 20},
    }
    assert (figures["rows"]["trials"], figures["rows"]["epochs"]) == (40, 40)
    shown = capsys.readouterr().out
    assert "0 without success" in shown
    assert "The gate" not in shown


async def test_copies_of_a_job_are_whole_jobs(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'bso.sqlite3'}"
    async with job_service(url, job_id=growth.JOB, policy=GP_VOI) as server:
        await server.reach(await server.suggest())
        await update_all(server.store)
        await growth.change(url, *growth.copies(3))
        totals = await TotalsReader(server.store).read()
        assert [*totals] == ["job-0", "job-1", "job-2"]
        assert [each.trials for each in totals.values()] == [{TrialState.COMPLETED: 1}] * 3
        for server.job_id in totals:
            assert await server.differences() == []
            assert (await server.show()).job.job_id == server.job_id


def test_longer_history_repeats_the_runs_with_later_events() -> None:
    trials = [{"trial_number": n, "started_event": 2 * n - 1, "ended_event": 2 * n, "size": n} for n in (1, 2)]
    job, *runs = growth.longer([{"trials": 2}, *trials], 5)
    assert job == {"trials": 5}
    assert [(run["trial_number"], run["started_event"], run["ended_event"]) for run in runs] == [
        (n, 2 * n - 1, 2 * n) for n in range(1, 6)
    ]
    assert [run["size"] for run in runs] == [1, 2, 1, 2, 1]
