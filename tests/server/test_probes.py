"""Probes on the server: stored with the job, used by decisions, shown and exported, on each kind of database."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from bso_server.cli.jobs import explanation_text, job_text
from bso_server.errors import InvalidReportError
from bso_server.service import reading
from bso_server.service.health import differences
from tests.support.exports import export_over, import_over, renamed
from tests.support.jobs import job
from tests.support.service import JobService, job_service, trial_id
from tests.support.wire import assert_refused, begin
from zeus_plugins.protocol import (
    GP_VOI,
    CreatedJob,
    EndReason,
    Probe,
    ProbedSize,
    TrialDispatch,
    TrialEnd,
    TrialProbe,
    TrialState,
)

pytestmark = pytest.mark.storage

# By these costs, 32 is far cheaper than the default, 16. A size outside the job is ignored.
COSTS_J = {8: 400.0, 16: 200.0, 32: 20.0, 48: 1.0}


def probe_of(of_job: CreatedJob, **fields: Any) -> Probe:
    sizes = [ProbedSize(batch_size=size, time_s=1e-3, energy_j=2 * cost, error=0.1) for size, cost in COSTS_J.items()]
    critical = {"critical_batch_size": 900.0, "critical_error": 1.0}
    return Probe.model_validate({"gpus": of_job.gpus, "sizes": sizes, **critical, **fields})


async def store(server: JobService, trial: TrialDispatch, probe: Probe) -> None:
    body = TrialProbe(**{**trial_id(trial).model_dump(), **probe.model_dump()})
    await server.service.transact(server.service.commands.store_probe, body)


async def test_probe_is_stored_with_the_job_and_replaces_the_former(bso: JobService) -> None:
    trial = await bso.suggest()
    assert (await bso.show()).probe is None
    for probe in (probe_of(bso.job), probe_of(bso.job, critical_batch_size=300.0)):
        await store(bso, trial, probe)
        view = await bso.show()
        assert view.probe == probe
    assert [arm.probed_cost_j for arm in view.arms] == pytest.approx([400.0, 200.0, 20.0], rel=0.01)
    await bso.reach(trial)
    assert (await bso.show()).probe == probe
    assert await bso.store.read(differences, bso.job_id) == []


async def test_probe_of_different_gpus_is_refused(bso: JobService) -> None:
    other = bso.job.gpus.model_copy(update={"gpu_model": "H100"})
    with pytest.raises(InvalidReportError, match=r"the probe is of 1 x H100"):
        await store(bso, await bso.suggest(), probe_of(bso.job, gpus=other))


async def test_probe_counts_only_on_the_probed_gpus(bso: JobService) -> None:
    await store(bso, await bso.suggest(), probe_of(bso.job))
    for gpu_model, is_known in (("H100", False), (bso.job.gpu_model, True)):
        known = (await bso.show()).job
        revised = {**known.model_dump(), "gpu_model": gpu_model, "revise": True}
        await bso.service.register(CreatedJob.model_validate(revised))
        view = await bso.show()
        assert [arm.probed_cost_j is not None for arm in view.arms] == [is_known] * 3
        assert (view.probe is not None, (await bso.history()).probe is not None) == (is_known, is_known)


async def test_sizes_out_of_memory_in_the_probe_are_excluded(bso: JobService) -> None:
    await store(bso, await bso.suggest(), probe_of(bso.job, out_of_memory=32))
    assert [arm.infeasible for arm in (await bso.show()).arms] == [None, None, EndReason.OUT_OF_MEMORY]


@pytest.mark.parametrize(("first_run", "size"), [("default", 16), ("predicted", 32)])
async def test_withdrawn_first_trial_is_followed_by_the_predicted_size(
    database_url: str, first_run: str, size: int
) -> None:
    async with job_service(database_url, policy=GP_VOI, first_run=first_run) as server:
        first = await server.suggest()
        assert first.batch_size == 16
        await store(server, first, probe_of(server.job))
        end = TrialEnd(**trial_id(first).model_dump(), outcome=TrialState.WITHDRAWN)
        await server.service.transact(server.service.commands.end_trial, end)
        next_one = await server.store.read(reading.explain, server.job_id)
        assert (next_one.batch_size, next_one.probe) == (size, probe_of(server.job))
        second = await server.suggest()
        assert second.batch_size == size
        await server.reach(second)
        # The job continues without any run at the default.
        assert (await server.suggest()).trial_number == 3
        assert (await server.show()).savings.recurrences == 1


async def test_probe_is_shown_in_a_single_line(bso: JobService) -> None:
    await store(bso, await bso.suggest(), probe_of(bso.job, out_of_memory=64))
    line = "critical batch size about 900, within a factor of 2; 4 sizes probed; 64 ran out of memory"
    shown = job_text(await bso.show()).splitlines()
    assert shown[1] == f"probe: {line}"
    assert any("PROBED EPOCH J" in each for each in shown)
    explained = explanation_text(await bso.store.read(reading.explain, bso.job_id))
    assert f"Probe: {line}." in explained


class TestOverHttp:
    @pytest.fixture
    def trial(self, http: httpx.Client) -> dict[str, Any]:
        """A trial with a stored probe."""
        job_id = f"probed-{uuid.uuid4().hex[:8]}"
        spec = http.post("/jobs", json=job(job_id=job_id, policy=GP_VOI)).raise_for_status().json()
        trial = begin(http, job_id)
        probe = probe_of(CreatedJob.model_validate(spec)).model_dump(mode="json")
        http.put("/trials/probe", json=trial | probe).raise_for_status()
        return trial

    def test_page_shows_the_probe_and_the_probed_costs(self, http: httpx.Client, trial: dict[str, Any]) -> None:
        page = http.get(f"/ui/jobs/{trial['job_id']}").raise_for_status().text
        assert "critical batch size about 900, within a factor of 2; 4 sizes probed" in page

    def test_probe_is_exported_and_imported(self, http: httpx.Client, trial: dict[str, Any]) -> None:
        export = export_over(http, trial["job_id"])
        assert export[0]["probe"]["critical_batch_size"] == 900.0
        copy = renamed(export)
        import_over(http, copy).raise_for_status()
        views = [http.get(f"/api/jobs/{each[0]['job']['job_id']}").json() for each in (export, copy)]
        assert views[0]["probe"] == views[1]["probe"] is not None

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ({"critical_error": None}, "critical"),
            ({"sizes": [{"batch_size": 8, "time_s": 1, "energy_j": 1, "error": 0}]}, "sizes.0.error"),
            ({"gpus": {"max_power": 1, "number_of_gpus": 1, "gpu_model": "other"}}, "the probe is of 1 x other"),
        ],
    )
    def test_wrong_probe_is_refused(
        self, http: httpx.Client, trial: dict[str, Any], wrong: dict[str, Any], words: str
    ) -> None:
        before = http.get(f"/api/jobs/{trial['job_id']}").json()
        body = trial | before["probe"] | wrong
        assert_refused(http.put("/trials/probe", json=body), 422, None, words)
        assert http.get(f"/api/jobs/{trial['job_id']}").json() == before
