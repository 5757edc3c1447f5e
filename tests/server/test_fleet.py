"""Savings of a job, and the report on all jobs, through the service on each kind of database."""

from __future__ import annotations

import random
import re

import pytest

from bso_server.cli.jobs import job_text
from bso_server.errors import DatabaseUnavailableError, JobConflictError
from bso_server.service import reading
from bso_server.service.fleet import FleetReader
from bso_server.service.health import TotalsReader
from bso_server.service.pages import Pages
from bso_server.service.reading import explain
from bso_server.service.verdicts import update_all
from bso_server.service.views import FleetJob, FleetPage, Tariff
from bso_server.storage.store import Store
from bso_server.ui import fleet, html
from tests.support.exports import exported, import_lines, renamed
from tests.support.service import HOUR_S, JobService, new_job, result
from zeus_plugins.protocol import (
    GP_VOI,
    ZEUS,
    CreatedJob,
    Origin,
    SavingsView,
    SavingsWord,
    TrialDispatch,
    TrialState,
)

# Three sizes with 16 as the default. Costs in joules after 4 epochs.
COSTS_J = {8: 900.0, 16: 400.0, 32: 240.0}
WOBBLE = (1.0, 1.04, 0.97, 1.02, 0.98)
TAGS = {"team": "ads"}


@pytest.fixture
async def bso(store: Store) -> JobService:
    return await new_job(store, policy=GP_VOI, mab_seed=1, eta_knob=1.0, tags=TAGS, controls=0.3)


async def run(server: JobService, scale: float = 1.0, cost_j: float | None = None) -> TrialDispatch:
    """Let one recurrence, an hour after the last one, reach the target."""
    server.wait(HOUR_S)
    trial = await server.suggest()
    cost_j = cost_j or scale * COSTS_J[trial.batch_size] * WOBBLE[trial.trial_number % len(WOBBLE)]
    await server.report(trial, cost_j=cost_j / 4, epoch=1)
    await server.report(trial, cost_j=cost_j, epoch=4, metric=0.95)
    return trial


async def run_noisily(server: JobService, runs: int, *, at_32_j: float, noise: float) -> None:
    """Let recurrences reach the target whose costs vary at random."""
    chance = random.Random(3)  # noqa: S311 - no secret
    for _ in range(runs):
        server.wait(HOUR_S)
        trial = await server.suggest()
        cost_j = {**COSTS_J, 32: at_32_j}[trial.batch_size] * chance.lognormvariate(0, noise)
        await server.report(trial, cost_j=1000.0 * cost_j, epoch=4, metric=0.95)


async def report_of(server: JobService, since: str, by: str = "job") -> FleetPage:
    return await FleetReader(server.store, Tariff(), lambda: server.now).read(since, by)


async def job_in(server: JobService, since: str) -> FleetJob:
    """Return this test's job in the report; the database has others."""
    page = await report_of(server, since)
    return next(each for each in page.costliest if each.key == server.job_id)


async def test_report_on_the_whole_life_of_a_job_has_the_figures_of_its_page(bso: JobService) -> None:
    for _ in range(24):
        await run(bso, 1000.0)
    stopped = await bso.suggest()
    await bso.report(stopped, cost_j=90e3)
    await bso.end(stopped)
    savings, line = (await bso.show()).savings, await job_in(bso, "90d")
    assert (line.word, line.saves, line.runs) == (savings.word, 1, 25) == (SavingsWord.SAVES, 1, 25)
    assert (line.energy_j, line.time_s) == pytest.approx((savings.energy_j.spent, savings.time_s.spent))
    assert line.energy_saved_j is not None
    assert savings.energy_j.so_far is not None
    assert line.energy_saved_j.share.middle == pytest.approx(savings.energy_j.so_far.middle)
    assert line.energy_saved_j.share.low == pytest.approx(savings.energy_j.so_far.low)
    if savings.energy_j.saved is not None:
        assert line.energy_saved_j.middle == pytest.approx(savings.energy_j.saved)


async def test_period_counts_the_trials_that_ended_in_it(bso: JobService) -> None:
    trials = [await run(bso, 1000.0) for _ in range(24)]
    line = await job_in(bso, "6h")
    expected_j = [1000.0 * COSTS_J[each.batch_size] * WOBBLE[each.trial_number % 5] for each in trials[-6:]]
    assert (line.runs, line.energy_j) == (6, pytest.approx(sum(expected_j)))
    assert line.energy_saved_j is not None
    assert line.energy_saved_j.taken == pytest.approx(sum(expected_j))
    # 400 J, or the cost of a run at the default, in place of each.
    assert line.energy_saved_j.middle == pytest.approx(6 * 400e3 - sum(expected_j), rel=0.1)
    bso.wait(7 * HOUR_S)
    assert bso.job_id not in {each.key for each in (await report_of(bso, "6h")).costliest}


async def test_job_whose_default_is_best_is_advised_to_train_at_it_alone(store: Store) -> None:
    server = await new_job(store, policy=GP_VOI, mab_seed=1, eta_knob=1.0, default_batch_size=32)
    for _ in range(14):
        await run(server, 1000.0)
    line = await job_in(server, "90d")
    command = f"bso-server jobs revise {server.job_id} --batch-sizes 32"
    assert line.advice == (
        f"the default, 32, is the best batch size: train at 32 alone ({command}), or offer other sizes"
    )
    # The policy accepts the advice.
    known = (await server.show()).job
    asked = CreatedJob.model_validate({**known.model_dump(), "batch_sizes": [32], "revise": True})
    assert (await server.service.register(asked))[0].batch_sizes == (32,)


async def test_job_whose_sizes_hardly_differ_is_advised_to_train_at_the_default_alone(bso: JobService) -> None:
    await run_noisily(bso, 40, at_32_j=395.0, noise=0.05)
    line = await job_in(bso, "90d")
    assert line.advice is not None
    assert line.advice.startswith("the difference is small: a run saves between -")
    assert line.advice.endswith(
        f": train at 16 alone (bso-server jobs revise {bso.job_id} --batch-sizes 16), or offer other sizes"
    )


async def test_report_may_take_longer_than_a_request(bso: JobService) -> None:
    await run(bso)
    impatient = Store(bso.store._database, patience_s=1e-6)
    with pytest.raises(DatabaseUnavailableError):
        await impatient.read(reading.list_jobs)
    page = await FleetReader(impatient, Tariff(), lambda: bso.now).read("1h", "job")
    assert bso.job_id in {each.key for each in page.costliest}


async def test_stuck_job_is_listed_with_advice(store: Store) -> None:
    server = await new_job(store, policy=GP_VOI, mab_seed=1, batch_sizes=[16, 32])
    for _ in range(6):
        server.wait(HOUR_S)
        await server.report(await server.suggest(), cost_j=1e6, epoch=10)
    stuck = (await server.show()).stuck
    assert stuck is not None
    assert {each.key: each.stuck for each in (await report_of(server, "6h")).stuck}[server.job_id] == stuck


async def test_estimated_energy_is_marked(store: Store) -> None:
    server = await new_job(store)
    server.wait(2e9)  # Long after the jobs of other tests.
    for source, mark in (("estimate: 65 W stated", "estimated"), ("nvml", "partly estimated")):
        report = result(await server.suggest(), cost_j=500.0, metric=0.95, epoch=5, energy_source=source)
        await server.service.reports.record_report(report)
        page = await report_of(server, "1h")
        assert page.total.estimated_j == 500.0
        used = f"1 job used {page.total.runs * 500:g} J ({mark})".replace("1000 J", "1 kJ")
        said = fleet.headline(page).text.replace("\N{NO-BREAK SPACE}", " ")
        assert said == f"In the last 1 hour, {used}; none is shown to save, 1 is not shown yet."


async def test_tags_group_jobs_and_travel_with_exports(bso: JobService) -> None:
    await run(bso)
    tags = {"site": bso.job_id}
    known = (await bso.show()).job
    await bso.service.register(known.model_copy(update={"tags": tags, "revise": True}))
    groups = {each.key: each.jobs for each in (await report_of(bso, "1h", "site")).groups}
    assert groups.pop(bso.job_id) == 1
    assert groups.keys() <= {"no tag site"}
    copy = renamed(await exported(bso.store, bso.job_id))
    assert copy[0]["job"]["tags"] == tags
    imported = await import_lines(bso.store, copy)
    assert (await exported(bso.store, imported.job_id))[0]["job"]["tags"] == tags


async def test_other_tags_are_a_revision_and_no_tags_keep_the_jobs(bso: JobService) -> None:
    known = (await bso.show()).job
    assert known.tags == TAGS
    assert (await bso.service.register(known.model_copy(update={"tags": None})))[0] == known
    other = known.model_copy(update={"tags": {"team": "maps"}})
    with pytest.raises(JobConflictError, match=r"tags is \{'team': 'ads'\}, not \{'team': 'maps'\}"):
        await bso.service.register(other)
    revised, _ = await bso.service.register(other.model_copy(update={"revise": True}))
    assert revised.tags == {"team": "maps"}
    assert [each.in_words for each in (await bso.show()).revisions] == ["tags {'team': 'ads'} -> {'team': 'maps'}"]


# --- Savings of one job -----------------------------------------------------------------------------------------------


async def savings_of(server: JobService) -> SavingsView:
    return (await server.show()).savings


async def test_control_runs_lead_to_a_verdict(bso: JobService) -> None:
    for _ in range(24):
        await run(bso)
    view = await bso.show()
    controls = [trial for trial in view.trials if trial.origin is Origin.CONTROL]
    assert {trial.batch_size for trial in controls} == {16}
    reasons = {trial.reason.split("; ")[0] for trial in controls}
    assert reasons == {"control run at your default, 16: it measures the saving"}
    assert all(trial.epoch_bound == 10 for trial in controls)
    assert view.savings.word is SavingsWord.SAVES
    assert len(controls) + 1 == view.savings.controls
    spent, limit = view.savings.control_runs.split(" of the job so far, ")
    assert re.fullmatch(r"Control runs have cost \d+\.\d%", spent)
    assert limit == "and the next one waits until this is below 2%."  # of 30 % until the verdict
    assert view.savings.control_runs in view.savings.in_words
    now = view.savings.cost_j.now
    assert now is not None
    assert now.low is not None
    assert now.low < 1 - 240 / 400 < now.high
    assert view.savings.control_cost_j == sum(trial.cost_j or 0 for trial in controls)


async def test_explanation_of_the_next_choice_includes_control_runs(bso: JobService) -> None:
    for _ in range(20):
        explained = await bso.store.read(explain, bso.job_id)
        trial = await run(bso)
        assert (explained.batch_size, explained.origin) == (trial.batch_size, trial.origin)


async def test_discarded_run_counts_towards_no_saving(bso: JobService) -> None:
    trials = [await run(bso) for _ in range(12)]
    before = await savings_of(bso)
    control = next(trial for trial in trials if trial.origin is Origin.CONTROL)
    await bso.service.transact(bso.service.commands.discard, bso.job_id, control.trial_number)
    after = await savings_of(bso)
    assert after.controls == before.controls - 1
    assert after.cost_j.spent < before.cost_j.spent


async def test_job_or_policy_can_exclude_control_runs(store: Store) -> None:
    for fields in ({"policy": GP_VOI, "controls": "off"}, {"policy": ZEUS}):
        server = await new_job(store, mab_seed=1, eta_knob=1.0, **fields)
        for _ in range(20):
            await run(server)
        assert Origin.CONTROL not in {trial.origin for trial in (await server.show()).trials}


async def test_all_views_show_the_same_saving(bso: JobService) -> None:
    """Compare the console's table, the job's page, the list of jobs, the report, and the metrics."""
    while (await savings_of(bso)).cost_j.saved is None:
        await run(bso)
    view = await bso.show()
    store, pages = bso.store, Pages(Tariff())
    _, job_page = await store.read(pages.job, bso.job_id)
    await update_all(store)
    _, jobs_page = await store.read(pages.jobs, containing=bso.job_id)
    totals = (await TotalsReader(store).read())[bso.job_id]
    assert job_page is not None
    assert jobs_page is not None
    assert job_page.view.savings == jobs_page.jobs[0].savings == view.savings
    assert totals.verdict.savings == view.savings
    assert view.savings.in_words in job_text(view)
    report = html.page(job_page, html.Reader(root="", now=bso.now)).replace("&#39;", "'")
    assert view.savings.claim in report
    assert view.savings.control_runs in report


async def test_only_runs_with_a_lease_count_as_running(bso: JobService) -> None:
    """A suspended run does not run, and a killed one runs until its lease ends, which also renews the pages."""
    pages = Pages(Tariff(), clock=lambda: bso.now)

    async def running() -> tuple[list[int], list[str]]:
        version, page = await bso.store.read(pages.job, bso.job_id)
        list_version, jobs_page = await bso.store.read(pages.jobs, containing=bso.job_id)
        assert page is not None
        assert jobs_page is not None
        return [page.running, jobs_page.jobs[0].running], [version, list_version]

    await bso.end(await bso.suggest(), TrialState.SUSPENDED)
    assert (await running())[0] == [0, 0]
    await bso.suggest()
    counts, versions = await running()
    assert counts == [1, 1]
    bso.wait(30 * 24 * HOUR_S)
    counts, later = await running()
    assert counts == [0, 0]
    assert set(versions).isdisjoint(later)
