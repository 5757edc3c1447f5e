"""Savings through the service, on each kind of database: control runs, verdicts, and equal figures everywhere."""

from __future__ import annotations

import pytest

from bso_server.cli.jobs import job_text
from bso_server.service import savings as savings_module
from bso_server.service.cache import Cache
from bso_server.service.health import TotalsReader
from bso_server.service.pages import Pages
from bso_server.service.reading import explain
from bso_server.service.views import Tariff
from bso_server.storage.store import Store
from bso_server.ui.html import report_page
from tests.support.service import JobService, new_job
from zeus_plugins.protocol import GP_VOI, ZEUS, Origin, SavingsView, SavingsWord, TrialDispatch, TrialState

# Three sizes with 16 as the default. Costs in joules after 4 epochs.
COSTS_J = {8: 900.0, 16: 400.0, 32: 240.0}
WOBBLE = (1.0, 1.04, 0.97, 1.02, 0.98)


@pytest.fixture
async def bso(store: Store) -> JobService:
    return await new_job(store, policy=GP_VOI, mab_seed=1, eta_knob=1.0)


async def run(server: JobService, cost_j: float | None = None) -> TrialDispatch:
    """Let one recurrence reach the target."""
    trial = await server.suggest()
    cost_j = cost_j or COSTS_J[trial.batch_size] * WOBBLE[trial.trial_number % len(WOBBLE)]
    await server.report(trial, cost_j=cost_j / 4, epoch=1)
    await server.report(trial, cost_j=cost_j, epoch=4, metric=0.95)
    return trial


async def savings_of(server: JobService) -> SavingsView:
    return (await server.show()).savings


async def test_control_runs_lead_to_a_verdict(bso: JobService) -> None:
    for _ in range(24):
        await run(bso)
    view = await bso.show()
    controls = [trial for trial in view.trials if trial.origin is Origin.CONTROL]
    assert {trial.batch_size for trial in controls} == {16}
    assert {trial.reason for trial in controls} == {"control run at your default, 16: it measures the saving"}
    assert all(trial.epoch_bound == 10 for trial in controls)
    assert view.savings.word is SavingsWord.SAVES
    assert len(controls) == view.savings.controls == 3
    now = view.savings.cost_j.now
    assert now is not None
    assert now.low is not None
    assert now.low < 1 - 240 / 400 < now.high
    assert view.savings.control_cost_j == sum(trial.cost_j or 0 for trial in controls)


async def test_no_saving_is_claimed_before_the_first_control_run(bso: JobService) -> None:
    await run(bso)
    while (await run(bso)).origin is not Origin.CONTROL:
        savings = await savings_of(bso)
        assert savings.word is SavingsWord.NOT_SHOWN
        assert savings.cost_j.now is None
    assert (await savings_of(bso)).cause == "1 of at least 3 control runs so far"


async def test_explanation_of_the_next_choice_includes_control_runs(bso: JobService) -> None:
    for _ in range(20):
        explained = await bso.store.read(explain, bso.job_id)
        trial = await run(bso)
        assert (explained.batch_size, explained.origin) == (trial.batch_size, trial.origin)


async def test_savings_learned_stepwise_equal_savings_from_the_database(
    bso: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(12):
        await run(bso)
        step_by_step = await savings_of(bso)
        monkeypatch.setattr(savings_module, "_learned", Cache(10))
        assert await savings_of(bso) == step_by_step


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
    _, jobs_page = await store.read(pages.jobs, containing=bso.job_id)
    totals = (await TotalsReader(store).read())[bso.job_id]
    assert job_page is not None
    assert jobs_page is not None
    assert job_page.view.savings == jobs_page.jobs[0].savings == view.savings
    assert totals.verdict is view.savings.word
    assert totals.saved_energy_j == view.savings.energy_j.saved
    assert view.savings.in_words in job_text(view)
    report = report_page(job_page, bso.now).replace("&#39;", "'")
    assert view.savings.claim in report
    assert view.savings.so_far in report


async def test_no_view_claims_an_unproven_saving(bso: JobService) -> None:
    """With equal sizes, no page says "saves", and no headline has a percentage."""
    for _ in range(10):
        await run(bso, cost_j=400.0)
        view, (_, page) = await bso.show(), await bso.store.read(Pages(Tariff()).job, bso.job_id)
        assert page is not None
        assert view.savings.word is SavingsWord.NOT_SHOWN
        html = report_page(page, bso.now)
        headline = html[html.index("<h1") : html.index("</h1>")]
        assert headline.startswith('<h1 class="headline">')
        assert "%" not in headline
        assert "saves" not in headline
        assert 'class="big gain"' not in html
        assert {trial.state for trial in view.trials} == {TrialState.COMPLETED}
