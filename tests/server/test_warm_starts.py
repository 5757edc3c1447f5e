"""Warm starts on the server: found at the registration, stored with the job, shown and exported; on each database."""

from __future__ import annotations

import math
import uuid
from typing import Any

import httpx
import pytest

from bso_server.cli.jobs import explanation_text, job_text
from bso_server.core.access import Caller, Scope
from bso_server.errors import InvalidJobError
from bso_server.service import reading
from bso_server.service.health import differences
from bso_server.storage.store import Store
from tests.support.exports import export_over, import_beside, renamed
from tests.support.jobs import job
from tests.support.service import JobService, new_job
from tests.support.wire import begin, reached
from zeus_plugins.protocol import GP_VOI, ZEUS, CreatedJob

pytestmark = pytest.mark.storage

TRAINING: dict[str, Any] = {
    "model": "Net",
    "framework": "lightning",
    "optimizer": "SGD",
    "monitor": "val_acc",
    "samples": 1000,
    "parameters": "0123456789abcdef",
    "data": "Digits",
}


@pytest.fixture
async def known(store: Store) -> JobService:
    """A server with a job on a V100 that has reached its target once, after 5 epochs at size 16."""
    # Tests share a database, so each has a training of its own.
    training = TRAINING | {"parameters": uuid.uuid4().hex[:16]}
    server = await new_job(store, policy=GP_VOI, fingerprint=training)
    await server.reach(await server.suggest())
    return server


async def registered(server: JobService, told: dict[str, Any] | None = None, **changes: Any) -> CreatedJob:
    """Another job of the same training, on an A40; `told` are changes of its fingerprint."""
    terms = server.job.model_dump(exclude={"job_id", "job_id_prefix"})
    body = job(**{**terms, "gpu_model": "A40", "fingerprint": terms["fingerprint"] | (told or {}), **changes})
    return (await server.service.register(CreatedJob.model_validate(body)))[0]


async def test_job_on_other_gpus_takes_over_the_epochs_of_the_same_training(known: JobService) -> None:
    new = await registered(known)
    assert new.warm is not None
    assert (new.warm.job_id, new.warm.gpus, new.warm.optimizer) == (known.job_id, known.job.gpus, "SGD")
    (epochs,) = new.warm.epochs
    assert (epochs.batch_size, epochs.log_epochs, epochs.reached) == (16, pytest.approx(math.log(5)), True)
    words = f"epochs as learned by job {known.job_id} on V100"
    # A later launch registers the job as before.
    again = CreatedJob.model_validate(new.model_dump(exclude={"registration_id", "warm"}))
    assert await known.service.register(again) == (new, False)
    view = await known.store.read(reading.show_job, new.job_id)
    assert f"warm start: {words}" in job_text(view).splitlines()
    explained = await known.store.read(reading.explain, new.job_id)
    assert explained.sentence == f"first run of job {new.job_id}; {words}"
    assert f"Warm start: {words}." in explanation_text(explained)


OTHERS: list[dict[str, Any]] = [
    {"gpu_model": "V100"},
    {"warm_start": "off"},
    {"policy": ZEUS},
    {"target_metric": 0.8},
    {"target_metric": None},
    {"higher_is_better_metric": False},
    {"confirm": 2},
    {"fingerprint": None},
    *({"told": {name: other}} for name in ("model", "parameters", "data", "monitor") for other in ("other", None)),
    {"told": {"optimizer": "Adam"}},
    {"told": {"samples": 1200}},
]


async def test_only_a_job_of_the_same_training_starts_warm(known: JobService) -> None:
    for changes in OTHERS:
        assert (await registered(known, **changes)).warm is None, changes
    told = {"samples": 1050, "optimizer": None}
    same: list[dict[str, Any]] = [{"number_of_gpus": 2, "gpu_model": "V100"}, {"told": told}]
    for changes in same:
        assert (await registered(known, **changes)).warm is not None, changes


async def test_of_several_jobs_the_one_with_the_most_completed_runs_counts(known: JobService) -> None:
    other = await registered(known, gpu_model="H100", warm_start="off")
    for runs, source in ((0, known.job_id), (2, other.job_id)):
        for _ in range(runs):
            await known.reach(await known.service.begin_trial(other.job_id))
        warm = (await registered(known)).warm
        assert warm is not None
        assert warm.job_id == source


async def test_named_job_needs_the_same_metric_only(known: JobService) -> None:
    asked = {"warm_start": known.job_id, "told": {"model": "Other", "optimizer": "Adam"}}
    warm = (await registered(known, **asked, gpu_model="V100")).warm_in_force
    assert warm is not None
    assert (warm.job_id, warm.optimizer) == (known.job_id, None)


async def test_named_job_without_epochs_of_the_same_metric_is_refused(known: JobService) -> None:
    cold = await registered(known, warm_start="off")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"warm_start": "job-none"}, "which does not exist: name another, or omit warm_start"),
        ({"warm_start": cold.job_id}, "which has learned no epochs to its target"),
        ({"target_metric": 0.8}, "which has another target_metric, 0.9 instead of 0.8"),
        ({"policy": ZEUS}, "which has another policy, 'gp_voi' instead of 'zeus'"),
        ({"fingerprint": {"monitor": "val_f1"}}, "which has another metric, val_acc instead of val_f1"),
    ]
    for changes, words in refused:
        with pytest.raises(InvalidJobError, match=words) as error:
            await registered(known, **{"warm_start": known.job_id, **changes})
        assert error.value.field == "warm_start"


async def test_any_token_that_registers_jobs_takes_over_epochs(known: JobService) -> None:
    caller = Caller("0123abcd", frozenset({Scope.READ, Scope.REPORT}))
    body = job(**{**known.job.model_dump(exclude={"job_id", "job_id_prefix"}), "gpu_model": "A40"})
    assert (await known.service.register(CreatedJob.model_validate(body), caller))[0].warm is not None


async def test_optimizer_that_turns_out_to_differ_ends_the_warm_start(known: JobService) -> None:
    for optimizer, is_warm in (("SGD", True), ("Adam", False)):
        new = await registered(known, {"optimizer": None})
        trial = await known.service.begin_trial(new.job_id)
        assert (trial.reason or "").endswith(f"job {known.job_id} on V100")
        await known.reach(trial)
        trial = await known.service.begin_trial(new.job_id)  # saves the memory
        again = CreatedJob.model_validate(new.model_dump() | {"fingerprint": TRAINING | {"optimizer": optimizer}})
        same, _ = await known.service.register(again)
        assert (same.warm_in_force is not None) is is_warm
        await known.reach(trial)
        assert await known.store.read(differences, new.job_id) == []


async def test_revision_starts_no_job_warm_and_may_end_a_warm_start(known: JobService) -> None:
    cold = await registered(known, warm_start="off")
    revised = CreatedJob.model_validate(cold.model_dump() | {"warm_start": "auto", "revise": True})
    assert (await known.service.register(revised))[0].warm is None
    warm = await registered(known)
    await known.reach(await known.service.begin_trial(warm.job_id))
    revised = CreatedJob.model_validate(warm.model_dump() | {"warm_start": "off", "revise": True})
    assert (await known.service.register(revised))[0].warm_in_force is None
    assert await known.store.read(differences, warm.job_id) == []


class TestOverHttp:
    @pytest.fixture
    def spec(self, http: httpx.Client) -> dict[str, Any]:
        """A job of a training of its own, that starts warm from another one."""
        training = TRAINING | {"parameters": uuid.uuid4().hex[:16]}
        first = http.post("/jobs", json=job(policy=GP_VOI, fingerprint=training)).raise_for_status().json()
        reached(http, begin(http, first["job_id"]), 500.0)
        body = job(policy=GP_VOI, fingerprint=training, gpu_model="A40")
        spec: dict[str, Any] = http.post("/jobs", json=body).raise_for_status().json()
        assert spec["warm"]["job_id"] == first["job_id"]
        return spec

    def test_page_shows_the_warm_start(self, http: httpx.Client, spec: dict[str, Any]) -> None:
        page = http.get(f"/ui/jobs/{spec['job_id']}").raise_for_status().text
        assert f"epochs as learned by job {spec['warm']['job_id']} on V100" in page

    def test_warm_start_is_exported_and_imported(self, http: httpx.Client, spec: dict[str, Any]) -> None:
        reached(http, begin(http, spec["job_id"]), 400.0)
        copy = renamed(export_over(http, spec["job_id"]))
        import_beside(http, copy)
        ids = spec["job_id"], copy[0]["job"]["job_id"]
        views = [http.get(f"/api/jobs/{job_id}").json() for job_id in ids]
        assert views[0]["job"]["warm"] == views[1]["job"]["warm"] == spec["warm"]
        expected = [[arm["expected_cost_j"] for arm in view["arms"]] for view in views]
        assert expected[0] == expected[1]

    def test_job_of_a_zeus_client_starts_cold_and_no_client_gives_epochs(
        self, http: httpx.Client, spec: dict[str, Any]
    ) -> None:
        sent = {name: spec[name] for name in ("warm", "fingerprint")}
        for fields in ({}, sent, {**sent, "policy": GP_VOI, "warm_start": "off"}):
            body = job(**{name: fields[name] for name in fields})
            assert http.post("/jobs", json=body).raise_for_status().json()["warm"] is None
