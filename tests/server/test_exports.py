"""Exporting a job and importing the copy under another id, on each kind of database; pruning of reports."""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bso_server.core.access import Scope
from bso_server.core.job import replay
from bso_server.core.model import TrialRecord
from bso_server.errors import (
    BsoError,
    InvalidImportError,
    InvalidJobError,
    JobConflictError,
    PolicyNotInstalledError,
    StaleLeaseError,
)
from bso_server.service import reading
from bso_server.service.health import differences
from bso_server.service.loading import known_job, known_trial
from bso_server.service.tokens import Tokens
from bso_server.service.views import EpochView
from bso_server.storage.rows import StoredEpoch
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support.databases import DATABASES
from tests.support.exports import (
    Lines,
    export_over,
    exported,
    import_beside,
    import_lines,
    renamed,
)
from tests.support.jobs import THREE_SIZES, job
from tests.support.properties import any_job, examples
from tests.support.service import HOUR_S, JobService, live, new_job, remembered
from tests.support.wire import begin, reached, report
from zeus_plugins.protocol import (
    CreatedJob,
    Heartbeat,
    TrainingResult,
    TrialDispatch,
    TrialId,
    TrialState,
)

pytestmark = pytest.mark.storage


def lived(http: httpx.Client) -> str:
    """Create a job in its bandit stage with completed, failed and running trials; return its id.

    The completed trials have power limits.
    """
    job_id = f"move-{uuid.uuid4().hex[:8]}"
    http.post("/jobs", json=job(job_id=job_id, num_pruning_rounds=1, mab_seed=1)).raise_for_status()
    for cost_j in (500, 400, 450):
        trial = begin(http, job_id)
        limit = {"power_limit_w": 80.0, "power_limits": 2}
        report(http, trial, time=1, energy=100, metric=0.25, current_epoch=1, **limit)
        reached(http, trial, cost_j)
    http.patch("/trials", json=begin(http, job_id)).raise_for_status()
    report(http, begin(http, job_id), time=1, energy=100, metric=0.25, current_epoch=0.5)
    return job_id


@pytest.fixture(scope="module")
def export(http: httpx.Client) -> Lines:
    """Export of such a job, which no test changes."""
    return export_over(http, lived(http))


def view(http: httpx.Client, job_id: str) -> dict[str, Any]:
    """Return everything that can be seen of a job except its id."""
    path = f"/api/jobs/{job_id}"
    job = http.get(path).raise_for_status().json()
    assert job["job"].pop("job_id") == job_id
    (summary,) = [
        one for one in http.get("/api/jobs", params={"limit": 1000}).json()["jobs"] if one["job_id"] == job_id
    ]
    pages = [http.get(f"/ui/jobs/{job_id}/trials/{trial['trial_number']}.json").json() for trial in job["trials"]]
    _, *trials = export_over(http, job_id)
    return {
        "job": job,
        "summary": {**summary, "job_id": None},
        "epochs": [page["epochs"] for page in pages],
        "trials": trials,
    }


class TestOverHttp:
    def test_imported_job_looks_and_decides_like_the_original(self, http: httpx.Client) -> None:
        first = lived(http)
        copy = renamed(export_over(http, first))
        second = copy[0]["job"]["job_id"]
        imported = import_beside(http, copy)

        assert (imported.job_id, imported.trials) == (second, 5)
        assert view(http, first)["job"]["stage"] == "bandit"
        assert [each["power_limits"] for each in view(http, first)["trials"]] == [2, 2, 2, None, None]
        assert view(http, second) == view(http, first)
        for cost_j in (420, 430, 390, 440):
            trials = [http.get("/jobs/batch_size", params={"job_id": job_id}).json() for job_id in (first, second)]
            assert {**trials[0], "job_id": second} == trials[1]
            for trial in trials:
                reached(http, {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}, cost_j)

    def test_export_of_an_earlier_version_is_imported(self, http: httpx.Client, export: Lines) -> None:
        new, old = renamed(export), renamed(export)
        old[0]["job"]["first_run"] = "predicted"
        old[0]["probe"] = {"gpus": {"max_power": 100}, "sizes": [{"batch_size": 8}], "critical_batch_size": 90}
        sample = {"limit_w": 80.0, "steps": 4, "time_s": 1.5, "energy_j": 100.0, "source": "nvml"}
        old[1]["power_profile"] = {"samples": [sample], "stored_at": "2026-01-01T00:00:00Z"}
        for copy in (new, old):
            import_beside(http, copy)
        first, second = (export_over(http, copy[0]["job"]["job_id"]) for copy in (new, old))
        for lines in (first, second):
            del lines[0]["job"]["job_id"], lines[0]["job"]["registration_id"]
        assert first == second

    def test_running_trial_continues_in_the_imported_job(self, http: httpx.Client, export: Lines) -> None:
        copy = renamed(export)
        import_beside(http, copy)
        trial = {"job_id": copy[0]["job"]["job_id"], "batch_size": export[5]["batch_size"], "trial_number": 5}
        assert reached(http, trial, cost_j=500)["converged"]

    def test_import_leaves_an_existing_job_unchanged(self, http: httpx.Client, export: Lines) -> None:
        before = view(http, export[0]["job"]["job_id"])
        with pytest.raises(JobConflictError, match="exists") as refused:
            import_beside(http, export)
        assert refused.value.field == "job.job_id"
        assert view(http, export[0]["job"]["job_id"]) == before

    def test_job_without_trials_can_be_exported_and_imported(self, http: httpx.Client, export: Lines) -> None:
        copy = renamed([{**export[0], "trials": 0, "survivors": None, "rng_state": None}])
        import_beside(http, copy)
        assert begin(http, copy[0]["job"]["job_id"])["trial_number"] == 1


WRONG: list[tuple[str, Callable[[Lines], object], str]] = [
    ("another format", lambda export: export[0].update(format="other"), "line 1, format"),
    ("a later version", lambda export: export[0].update(version=2), "line 1, version"),
    ("no id", lambda export: export[0]["job"].update(job_id=None), "line 1, job.job_id"),
    ("a wrong registration", lambda export: export[0]["job"].update(max_power=0), "line 1, job.max_power"),
    ("a gap", lambda export: export.pop(2), "line 3, trial_number"),
    ("another size", lambda export: export[1].update(batch_size=32), "line 2, batch_size"),
    ("a far future", lambda export: export[0].update(created_at="9999-12-31T23:59:59-12:00"), "line 1, created_at"),
    ("a huge event", lambda export: export[1].update(started_event=2**31), "line 2, started_event"),
    ("disorder", lambda export: export[2].update(started_event=1), "line 3, started_event"),
    ("two at an event", lambda export: export[1].update(ended_event=3), "line 3, started_event"),
    ("an early end", lambda export: export[2].update(ended_event=2), "line 3, ended_event"),
    ("no end", lambda export: export[1].update(ended_event=None), "line 2, ended_event"),
    ("no date of the end", lambda export: export[1].update(ended_at=None), "line 2, ended_at"),
    ("an end while running", lambda export: export[5].update(ended_event=99), "line 6, ended_event"),
    ("no lease", lambda export: export[5].update(lease_expires_at=None), "line 6, lease_expires_at"),
    ("a metric of none", lambda export: export[1].update(metric=None), "line 2, metric"),
    ("no reports", lambda export: export[1].update(report_count=0), "line 2, time_s"),
    (
        "costless",
        lambda export: export[0]["job"].update(eta_knob=1) or export[1].update(energy_j=0),
        "line 2, energy_j",
    ),
    ("half a bound", lambda export: export[1].update(epoch_bound=9), "line 2, epoch_bound_reason"),
    ("a first report alone", lambda export: export[4].update(first_epoch=1), "line 5, first_epoch"),
    ("a late first report", lambda export: export[1].update(first_epoch=9), "line 2, first_epoch"),
    ("deviations of none", lambda export: export[4].update(deviations=[1, 1, 1]), "line 5, deviations"),
    ("one report, two epochs", lambda export: export[1].update(report_count=1, epochs=[]), "line 2, first_epoch"),
    ("no number of trials", lambda export: export[0].pop("trials"), "line 1, trials"),
    ("a trial less", lambda export: export.pop(), "line 1, trials"),
    ("a report too many", lambda export: export[1].update(report_count=1), "line 2, epochs"),
    ("an epoch twice", lambda export: export[1]["epochs"].append(export[1]["epochs"][0]), "line 2, epochs"),
    ("an epoch beyond", lambda export: export[1]["epochs"][0].update(report_number=9), "line 2, epochs"),
    ("a limit of none", lambda export: export[1].update(power_limits=None), "line 2, power_limits"),
    ("NUL", lambda export: export[1].update(reason="a\0b"), "line 2, reason"),
    ("no survivors", lambda export: export[0].update(survivors=None), "line 1, survivors"),
    ("foreign survivors", lambda export: export[0].update(survivors=[8, 32]), "line 1, survivors"),
    ("descending survivors", lambda export: export[0].update(survivors=[16, 8]), "line 1, survivors"),
    ("no generator", lambda export: export[0].update(rng_state="{}"), "line 1, rng_state"),
    (
        "a huge generator",
        lambda export: export[0].update(rng_state=export[0]["rng_state"].replace(": 0", f": {2**70}")),
        "line 1, rng_state",
    ),
]


@pytest.fixture(scope="module")
def export_on_sqlite(http_on_sqlite: httpx.Client) -> Lines:
    return export_over(http_on_sqlite, lived(http_on_sqlite))


@pytest.mark.parametrize(("spoil", "field"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_malformed_export_is_refused_and_leaves_nothing(
    http_on_sqlite: httpx.Client, export_on_sqlite: Lines, spoil: Callable[[Lines], object], field: str
) -> None:
    copy = renamed(export_on_sqlite)
    job_id = copy[0]["job"]["job_id"]
    spoil(copy)
    with pytest.raises((InvalidImportError, InvalidJobError, PolicyNotInstalledError)) as refused:
        import_beside(http_on_sqlite, copy)

    name = refused.value.field or ""
    assert name == field or name.startswith(f"{field}.")
    assert http_on_sqlite.get(f"/api/jobs/{job_id}").status_code == 404


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 12),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from([*TrialState, "bandit", "offline", "8", "2026-01-01T00:00:00Z", 2**30, 1e15, [8], [16], []]),
)


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all replaceable values within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(value: Any, path: Iterable[str | int]) -> Any:
    for key in path:
        value = value[key]
    return value


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)
@given(data=st.data())
def test_accepted_import_yields_a_usable_job(http: httpx.Client, export: Lines, data: st.DataObject) -> None:
    """Exports with odd values in odd places are refused, or become jobs that can be read, exported and continued."""
    copy = renamed(export)
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(list(places(copy))))
        inner, values = at(copy, path), [at(export, each) for each in places(export)]
        alike = [value for value in values if type(value) is type(inner[last]) and not isinstance(value, dict | list)]
        inner[last] = data.draw(st.sampled_from(alike) | ODD if alike else ODD)
    with suppress(InvalidImportError, InvalidJobError, JobConflictError, PolicyNotInstalledError):
        job_id = import_beside(http, copy).job_id
        assert view(http, job_id)["job"]["stage"] in {"pruning", "bandit"}
        again = renamed(export_over(http, job_id), f"move-{uuid.uuid4().hex[:8]}")
        again[0]["job"]["job_id_prefix"] = "move"
        import_beside(http, again)
        for _ in range(3):
            suggested = http.get("/jobs/batch_size", params={"job_id": job_id})
            assert suggested.status_code in {200, 409}, suggested.text
        # Its dates may be arbitrary, and later tests look for old dates.
        for made in (job_id, again[0]["job"]["job_id"]):
            http.delete("/jobs", params={"job_id": made}).raise_for_status()


async def imported(server: JobService) -> JobService:
    """Import a copy of the server's job under another id, on the same database and clock."""
    export = await exported(server.store, server.job_id)
    copy = JobService(server.store, **server.job.model_dump(exclude={"job_id"}))
    copy.now = server.now
    await import_lines(copy.store, renamed(export, copy.job_id))
    return copy


async def outcome(asked: Awaitable[TrialDispatch]) -> tuple[object, ...]:
    """Return the trial's facts, or the error of the request."""
    try:
        trial = await asked
    except BsoError as error:
        return type(error).__name__, str(error).replace(str(error).partition("'")[2].partition("'")[0], "JOB")
    return trial.batch_size, trial.trial_number, trial.origin, trial.reason


def without_ids(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the trials without the fields that an export omits: job id and idempotency key."""
    return [replace(trial, job_id="", idempotency_key=None) for trial in trials]


def assert_caches_equal_a_replay(transaction: Transaction, job_id: str) -> None:
    assert differences(transaction, job_id) == []
    job, trials = known_job(transaction, job_id), transaction.all_trials(job_id)
    replayed, found = replay(job.registration, trials, job.survivors), remembered(transaction, job_id)
    assert found.in_flight == replayed.in_flight
    if job.survivors is None:
        assert found.explorations == replayed.explorations
    events = [event for trial in trials for event in (trial.started_event, trial.ended_event) if event is not None]
    assert len(events) == len(set(events))
    assert max(events, default=0) <= job.event_count


@pytest.mark.parametrize("database_url", DATABASES, indirect=True, scope="module")
@any_job(20)
@pytest.mark.usefixtures("quiet_logs")
async def test_caches_of_any_history_equal_a_replay_and_its_copy_decides_alike(
    store: Store, seed: int, fields: dict[str, Any]
) -> None:
    server = await new_job(store, **fields)
    await live(server, random.Random(seed), steps=40)  # noqa: S311 - no secret
    await server.store.read(assert_caches_equal_a_replay, server.job_id)
    copy = await imported(server)
    one, other = await server.history(), await copy.history()
    for name in ("arms", "cheapest", "bandit_entered_at", "survivors"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("explorations", "in_flight"):
        assert without_ids(getattr(one, name)) == without_ids(getattr(other, name)), name
    for _ in range(5):
        assert await outcome(server.suggest()) == await outcome(copy.suggest())
        for each in (server, copy):
            each.wait(HOUR_S + 1)


async def test_abandoned_trial_returns_in_the_copy(bso: JobService) -> None:
    trial = await bso.suggest()
    bso.wait(HOUR_S + 1)
    await bso.service.reap()
    copy = await imported(bso)
    assert await copy.states() == [TrialState.ABANDONED]
    await copy.reach(trial.model_copy(update={"job_id": copy.job_id}))
    assert await copy.states() == [TrialState.COMPLETED]


async def test_copy_accepts_waiting_results_only_from_the_latest_run(bso: JobService) -> None:
    first = TrialId(**(await bso.suggest()).model_dump())
    resumes = Heartbeat(**first.model_dump(), regular=False, resumes=True)
    taken = await bso.service.transact(bso.service.commands.heartbeat, resumes)
    copy = await imported(bso)
    sent = [
        TrainingResult(**name.model_dump(), time=1, energy=1, metric=0.1, current_epoch=1)
        for epoch in (taken.lease_epoch, first.lease_epoch)
        for name in [first.model_copy(update={"job_id": copy.job_id, "lease_epoch": epoch})]
    ]
    assert not (await copy.service.reports.record_report(sent[0])).stop_train
    with pytest.raises(StaleLeaseError):
        await copy.service.reports.record_report(sent[1])


async def test_copy_keeps_the_owner_if_the_token_is_known(bso: JobService) -> None:
    _, record = await Tokens(bso.store).create("owner", [Scope.REPORT], shares_jobs=True)
    registration = CreatedJob.model_validate(job(**THREE_SIZES))
    await bso.service.register(registration, record.caller())
    export = await exported(bso.store, registration.job_id)
    assert (export[0]["owner"], export[0]["shared"]) == (record.token_id, True)
    for owner in (record.token_id, "ffffffff"):
        copy = renamed([{**export[0], "owner": owner}], f"job-{uuid.uuid4().hex}")
        job_id = (await import_lines(bso.store, copy)).job_id
        view = await bso.store.read(reading.show_job, job_id)
        # The owner's token is unknown on this server: the job is open to all tokens.
        assert (view.owner, view.shared) == (record.token_id if owner == record.token_id else None, True)


async def test_imported_id_must_start_with_the_prefix(bso: JobService) -> None:
    export = await exported(bso.store, bso.job_id)
    with pytest.raises(InvalidImportError, match=r"line 3, job\.job_id: 'other' does not start with job_id_prefix"):
        await import_lines(bso.store, renamed(export, "other"), first_line=3)
    export[0]["job"]["job_id"] = None
    with pytest.raises(InvalidImportError, match=r"job\.job_id: Input should be a valid string"):
        await import_lines(bso.store, export)


async def forget(bso: JobService, hours: float) -> int:
    return await bso.service.prune(timedelta(hours=hours))


async def kept(bso: JobService) -> tuple[EpochView, ...]:
    """Return the stored reports of the first trial."""
    job, trial = await bso.store.read(known_trial, bso.job_id, 1)
    return await bso.store.read(reading.epoch_views, job.registration, trial)


async def test_old_reports_are_pruned_and_trials_stay(bso: JobService) -> None:
    # Before all dates that other tests leave in the database.
    bso.now = datetime(2001, 1, 1, tzinfo=UTC)
    trial = await bso.suggest()
    for epoch in (1, 2, 3):
        await bso.report(trial, cost_j=100.0 * epoch, epoch=epoch)
        bso.wait(HOUR_S)
    before = await bso.show()

    # Taken three, two and one hours ago.
    assert await forget(bso, 4) == 0
    assert await forget(bso, 1.5) == 2
    left = await kept(bso)
    assert [epoch.report_number for epoch in left] == [3]
    assert await forget(bso, 0) == 1
    # The last report remains in the trial's own row.
    assert await kept(bso) == left
    assert await bso.show() == before


async def test_many_reports_are_pruned_in_small_batches(bso: JobService) -> None:
    bso.now = datetime(2000, 1, 1, tzinfo=UTC)
    await bso.suggest()
    rows = [StoredEpoch(bso.job_id, 1, number, number, number, number, 0.5, bso.now) for number in range(1, 2501)]
    await bso.store.write(lambda transaction: transaction.insert_epochs(rows))
    bso.wait(1)

    assert await bso.store.write(Transaction.delete_epochs_before, bso.now, limit=300) == 300
    left = await kept(bso)
    assert len(left) == 2200
    assert await forget(bso, 0) == 2200
