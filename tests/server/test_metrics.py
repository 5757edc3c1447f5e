"""``GET /metrics`` of an application in this process: counters, totals of the database, and access."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bso_server.core.occurrences import Occurrence, Outcome, TransactionDone, TrialEnded
from bso_server.core.savings import no_verdict
from bso_server.errors import DatabaseUnavailableError, UnknownJobError
from bso_server.metrics import prometheus
from bso_server.metrics.prometheus import MOST_JOBS, DatabaseMetrics, samples_of
from bso_server.service import verdicts
from bso_server.service.health import JobTotals, TotalsReader
from bso_server.service.pages import Pages
from bso_server.service.views import Tariff
from bso_server.storage.transaction import Transaction
from tests.support import ROOT, jobs
from tests.support.servers import bso_server
from tests.support.service import HOUR_S, job_service, open_store
from tests.support.tokens import bearer, make_token
from tests.support.watching import Values, scraped, trained, value, values_in, watched
from zeus_plugins.protocol import CreatedJob, SavingsWord, Stage, TrialState

PAGE = (ROOT / "docs" / "metrics.md").read_text()
# A hang appears as a failure.
LONG_S = 60.0


async def test_requests_suggestions_and_ends_are_counted(tmp_path: Path) -> None:
    async with watched(tmp_path) as http:
        job_id = await trained(http)
        assert (await http.get("/jobs/batch_size", params={"job_id": "nobody-1"})).status_code == 404
        values = await scraped(http)
        requests = "http_request_duration_seconds_count"
        assert value(values, requests, method="POST", route="/report", status="200") == 1
        assert value(values, requests, route="/jobs/batch_size", status="404") == 1
        assert value(values, "suggestions_total", policy="zeus") == 1
        assert value(values, "suggestions_total", policy="zeus", origin="exploration") == 1
        assert value(values, "trials_ended_total", state="completed") == 1
        assert value(values, "trials_ended_total") == 1
        assert value(values, "trials_abandoned_total") == 0
        assert value(values, "transactions_total", kind="write", outcome="committed") >= 3
        assert value(values, "transactions_total", outcome="refused") == 1
        assert job_id not in (await http.get("/metrics")).text


async def test_totals_of_the_database_are_exported(tmp_path: Path) -> None:
    async with watched(tmp_path) as http:
        await trained(http, energy_j=50.0)
        await trained(http, energy_j=70.0)
        values = await scraped(http)
        assert value(values, "jobs") == value(values, "jobs", policy="zeus", stage="pruning") == 2
        assert value(values, "trials") == value(values, "trials", state="completed") == 2
        assert value(values, "energy_joules") == 120
        assert value(values, "saved_energy_joules") == value(values, "saved_time_seconds") == 0
        assert value(values, "silent_trials") == 0
        assert value(values, "totals_errors_total") == 0
        assert 0 <= value(values, "totals_age_seconds") < 60


async def test_only_jobs_matching_the_pattern_are_exported_by_name(tmp_path: Path) -> None:
    async with watched(tmp_path, metrics_jobs="nightly-*") as http:
        named = await trained(http, job_id="nightly-1")
        other = await trained(http, job_id="daily-1")
        values = await scraped(http)
        assert value(values, "job_trials", job_id=named, state="completed") == 1
        assert value(values, "job_energy_joules") == value(values, "job_energy_joules", job_id=named) == 50
        assert other not in (await http.get("/metrics")).text


async def test_documented_metrics_and_labels_match_the_export(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(zeus_bso_\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    described = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(described) == len(rows)
    async with watched(tmp_path, metrics_jobs="*", is_paid_back=True) as http:
        await trained(http)
        found = {}
        for family in text_string_to_metric_families((await http.get("/metrics")).text):
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = family.type, {label for each in family.samples for label in each.labels} - {"le"}
            assert family.documentation.endswith(".")
        assert found == described


async def test_unknown_paths_and_methods_create_no_series(tmp_path: Path) -> None:
    async with watched(tmp_path, metrics_jobs="*") as http:
        await scraped(http)  # this request has series, too
        numbers = []
        for name in ("first", "second", "~%20"):
            for start in ("/", "/api/jobs/", "/ui/jobs/", "/ui/static/", "/health/"):
                for method in ("GET", "PURGE", name.upper()):
                    await http.request(method, f"{start}{name}/trials/7/nothing")
            numbers.append(len(await scraped(http)))
        values = await scraped(http)
        assert value(values, "http_request_duration_seconds_count", route="none", status="404") > 10
        assert len({*numbers, len(values)}) == 1


class TestAccess:
    async def test_metrics_require_the_read_scope(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'bso.sqlite3'}"
        assert bso_server("db", "upgrade", "--database-url", url).returncode == 0
        token = make_token(url, "read")
        async with watched(tmp_path, allowed_hosts="localhost") as http:
            assert (await http.get("/metrics")).status_code == 401
            assert (await http.get("/metrics", headers=bearer(token[:-1] + "_"))).status_code == 401
            assert (await http.post("/jobs", headers=bearer(token))).status_code == 403
            assert (await http.get("/ui/", auth=("any", "zbso_no"))).status_code == 401
            assert (await http.get("/metrics", headers={"Host": "other.example"})).status_code == 400
            answer = await http.get("/metrics", headers=bearer(token))
            assert answer.status_code == 200
            values = values_in(answer.text)
            reasons = {"no_token": 1, "bad_token": 2, "forbidden": 1, "host": 1}
            assert {each: value(values, "auth_failures_total", reason=each) for each in reasons} == reasons
            assert token.split("_")[1] not in answer.text

    async def test_metrics_can_be_public(self, tmp_path: Path) -> None:
        async with watched(tmp_path, metrics="open") as http:
            forwarded = {"X-Forwarded-For": "203.0.113.9"}
            assert (await http.get("/api/jobs", headers=forwarded)).status_code == 403
            assert (await http.get("/metrics", headers=forwarded)).status_code == 200


class TestListeners:
    """Listeners of a store hear only about committed changes."""

    async def test_rolled_back_changes_are_not_announced(self, tmp_path: Path) -> None:
        told: list[Occurrence] = []

        def refused(transaction: Transaction) -> None:
            transaction.tell(TrialEnded(TrialState.FAILED))
            raise UnknownJobError("job")

        async with open_store(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as store:
            store.listener = told.append
            with pytest.raises(UnknownJobError):
                await store.write(refused)
            await store.patient().write(lambda transaction: transaction.tell(TrialEnded(TrialState.FAILED)))
        outcomes = [each.outcome for each in told if isinstance(each, TransactionDone)]
        assert outcomes == [Outcome.REFUSED, Outcome.COMMITTED]
        assert told[2:] == [TrialEnded(TrialState.FAILED)]

    async def test_each_end_of_a_trial_is_announced_once(self, tmp_path: Path) -> None:
        told: list[Occurrence] = []
        async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as server:
            server.store.listener = told.append
            first, second, third, fourth = [await server.suggest() for _ in range(4)]
            await server.reach(first)
            await server.reach(first)  # repeated
            await server.end(second)
            await server.end(second)
            await server.end(third, TrialState.SUSPENDED)
            server.wait(HOUR_S + 1)
            await server.service.reap()
            await server.report(fourth, cost_j=1.0)
            server.wait(HOUR_S + 1)
            await server.suggest()
        ends = [each.state for each in told if isinstance(each, TrialEnded)]
        assert ends == ["completed", "failed", "abandoned", "abandoned"]


class TestTotals:
    @pytest.mark.storage
    async def test_totals_follow_the_trials(self, database_url: str) -> None:
        async with job_service(database_url) as server:
            reader = TotalsReader(server.store, clock=lambda: server.now)
            first, second = await server.suggest(), await server.suggest()
            await server.report(second, cost_j=30.0)
            totals = (await reader.read())[server.job_id]
            assert (totals.trials, totals.energy_j, totals.silent) == ({"running": 2}, 30.0, 0)
            await server.report(second, cost_j=40.0, epoch=2)
            await server.reach(first, cost_j=500.0)
            totals = (await reader.read())[server.job_id]
            assert (totals.trials, totals.energy_j) == ({"running": 1, "completed": 1}, 540.0)
            server.wait(HOUR_S + 1)
            assert (await reader.read())[server.job_id].silent == 1
            await server.service.reap()
            totals = (await reader.read())[server.job_id]
            assert (totals.trials, totals.silent) == ({"abandoned": 1, "completed": 1}, 0)
            await server.discard(first)
            assert (await reader.read())[server.job_id].trials == {"abandoned": 1, "withdrawn": 1}
            await server.service.delete_job(server.job_id)
            assert server.job_id not in await reader.read()

    async def test_run_without_a_lease_is_abandoned_in_every_view_before_a_launch_stores_it(
        self, tmp_path: Path
    ) -> None:
        async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as server:
            await server.report(await server.suggest(), cost_j=30.0)
            pages = Pages(Tariff(), clock=lambda: server.now)

            async def seen() -> list[object]:
                view = await server.show()
                version, page = await server.store.read(pages.job, server.job_id)
                _, trial = await server.store.read(pages.trial, server.job_id, 1)
                _, jobs = await server.store.read(pages.jobs)
                assert page
                assert trial
                assert jobs
                states = {view.trials[0].state, page.view.trials[0].state, page.points[0].state, trial.trial.state}
                return [view.trial_states, states, page.running, jobs.jobs[0].running, version]

            running = await seen()
            server.wait(HOUR_S + 1)
            lost = await seen()
            assert running[:-1] == [{"running": 1}, {"running"}, 1, 1]
            assert lost[:-1] == [{"abandoned": 1}, {"abandoned"}, 0, 0]
            assert running[-1] != lost[-1]
            assert (await TotalsReader(server.store).read())[server.job_id].trials == {"running": 1}

    async def test_verdicts_stuck_jobs_and_changed_costs_are_totals(self, tmp_path: Path) -> None:
        async def samples() -> dict[tuple[str, ...], float]:
            found = samples_of(await reader.read(), named="*")
            return {(name, *labels): value for name, values in found.items() for labels, value in values}

        missed = {"policy": "gp_voi", "eta_knob": 1.0, "mab_seed": 1}
        async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}", **missed) as server:
            reader, job_id = TotalsReader(server.store), server.job_id
            assert (await samples())["zeus_bso_stuck_jobs",] == 0
            for _ in range(5):
                await server.report(await server.suggest(), cost_j=900.0, epoch=10, metric=0.3)
            found = await samples()
            assert found["zeus_bso_stuck_jobs",] == found["zeus_bso_job_stuck", job_id] == 1
            assert ("zeus_bso_job_cost_change", job_id) not in found
            for number, cost_j in enumerate([100.0, 103.0, 98.0, 101.0, 99.0, 200.0]):
                await server.reach(await server.offline(16, f"key-{number}"), cost_j)
            assert (await samples())["zeus_bso_cost_changed_jobs", "more"] == 0
            await server.reach(await server.offline(16, "last"), 202.0)
            found = await samples()
            assert found["zeus_bso_stuck_jobs",] == found["zeus_bso_job_stuck", job_id] == 0
            assert found["zeus_bso_cost_changed_jobs", "more"] == 1
            assert found["zeus_bso_cost_changed_jobs", "less"] == 0
            assert found["zeus_bso_job_cost_change", job_id] == pytest.approx(1.0, abs=0.1)

    def test_verdict_of_a_job_is_a_sign(self) -> None:
        jobs = {word: totals_of_a_job(word=word) for word in SavingsWord}
        values = samples_of(jobs, named="*")["zeus_bso_job_verdict"]
        assert values == [(["saves"], 1), (["loses"], -1), (["not shown yet"], 0)]

    async def test_totals_of_several_pages_are_complete_and_in_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verdicts, "_JOBS_ON_A_PAGE", 2)
        async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as server:
            others = [CreatedJob.model_validate(jobs.job()) for _ in range(4)]
            for each in others:
                await server.service.register(each)
            expected = sorted([server.job_id, *(each.job_id for each in others)])
            assert list(await TotalsReader(server.store).read()) == expected
            # A job on two pages would cost the report and the metrics its reading twice.
            assert [job.job_id async for page in verdicts.judged_jobs(server.store) for job in page] == expected


def totals_of_a_job(*, word: SavingsWord = SavingsWord.NOT_SHOWN, energy_j: float = 5.0) -> JobTotals:
    verdict = no_verdict(CreatedJob.model_validate(jobs.job()))
    verdict = replace(verdict, savings=verdict.savings.model_copy(update={"word": word}))
    return JobTotals("zeus", Stage.BANDIT, {TrialState.COMPLETED: 3}, 0, energy_j, verdict)


class TestReading:
    """Totals are read in the background of scrapes."""

    @pytest.fixture(autouse=True)
    def _waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prometheus, "_WAIT_S", LONG_S)

    @staticmethod
    def metrics(read: Callable[[], Awaitable[dict[str, JobTotals]]], **options: Any) -> tuple[DatabaseMetrics, Counter]:
        errors = Counter("errors", "Errors.", registry=None)
        return DatabaseMetrics(read, errors, **options), errors

    @staticmethod
    async def values(metrics: DatabaseMetrics) -> Values:
        registry = CollectorRegistry()
        await metrics.refresh()
        registry.register(metrics)
        return values_in(generate_latest(registry).decode())

    @pytest.mark.parametrize(("took_s", "pause_s"), [(1.0, 15.0), (10.0, 90.0)])
    async def test_totals_are_not_read_more_often_than_the_interval(
        self, monkeypatch: pytest.MonkeyPatch, took_s: float, pause_s: float
    ) -> None:
        clock: Any = SimpleNamespace(now=1000.0)
        clock.monotonic = lambda: clock.now
        monkeypatch.setattr(prometheus, "time", clock)
        reads = 0

        async def read() -> dict[str, JobTotals]:
            nonlocal reads
            reads += 1
            clock.now += took_s
            return {"job": totals_of_a_job()}

        metrics, _ = self.metrics(read)
        for waited_s, wanted in ((0.0, 1), (pause_s - 1, 1), (1.0, 2), (pause_s, 3)):
            clock.now += waited_s
            assert value(await self.values(metrics), "energy_joules") == 5.0
            assert reads == wanted

    async def test_failed_reading_keeps_the_last_totals_and_is_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prometheus, "PERIOD_S", 0.0)
        monkeypatch.setattr(prometheus, "_REST", 0.0)
        answers: list[dict[str, JobTotals] | Exception] = [
            DatabaseUnavailableError("away"),
            {"job": totals_of_a_job()},
            DatabaseUnavailableError("away"),
            RuntimeError("a defect"),
        ]

        async def read() -> dict[str, JobTotals]:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        metrics, errors = self.metrics(read)
        assert await self.values(metrics) == {}
        for failures in (1, 2, 3):
            values = await self.values(metrics)
            assert (value(values, "energy_joules"), value_of(errors)) == (5.0, failures)
        assert answers == []

    async def test_hanging_database_does_not_block_scrapes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prometheus, "_WAIT_S", 0.01)
        released = asyncio.Event()

        async def read() -> dict[str, JobTotals]:
            await released.wait()
            return {"job": totals_of_a_job()}

        metrics, _ = self.metrics(read)
        async with asyncio.timeout(LONG_S):
            for _ in range(3):
                assert await self.values(metrics) == {}
        released.set()
        while not (values := await self.values(metrics)):
            await asyncio.sleep(0.01)
        assert value(values, "energy_joules") == 5.0
        await metrics.close()

    async def test_reading_beyond_the_deadline_is_abandoned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prometheus, "_DEADLINE_S", 0.01)
        metrics, errors = self.metrics(asyncio.Event().wait)
        while not value_of(errors):
            assert await self.values(metrics) == {}

    async def test_stopping_the_server_stops_the_reading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prometheus, "_WAIT_S", 0.01)
        metrics, errors = self.metrics(asyncio.Event().wait)
        assert await self.values(metrics) == {}
        await metrics.close()
        assert value_of(errors) == 0

    def test_number_of_jobs_exported_by_name_is_bounded(self) -> None:
        everything = {f"a-{n:03}": totals_of_a_job() for n in range(MOST_JOBS + 7)} | {"b-1": totals_of_a_job()}
        samples = samples_of(everything, "a-*")
        assert len(samples["zeus_bso_job_energy_joules"]) == MOST_JOBS
        assert samples["zeus_bso_unnamed_jobs"] == [([], 7)]
        assert samples["zeus_bso_energy_joules"] == [([], 5.0 * (MOST_JOBS + 8))]
        assert "zeus_bso_job_energy_joules" not in samples_of(everything, None)


def value_of(counter: Counter) -> float:
    (family,) = counter.collect()
    return next(each.value for each in family.samples if each.name.endswith("_total"))
