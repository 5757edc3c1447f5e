"""The first run of a job trains at the size that its probe predicts, from the first optimizer step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import IS_ABSENT
from tests.support.frameworks import FrameworkBench, Work
from tests.support.job_bench import EPOCH_OF_48, GPUS, NEXT_SIZE, SERVERS_SIZE, seconds_and_joules
from tests.support.lightning_bench import QUIET
from tests.support.trapped import OWN_SIZE, favour_large_batches, generous, predicting, rest, unreachable
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.protocol import GP_VOI, FirstRun, TrialState
from zeus_plugins.training import probe

LARGE = 96
EPOCH_OF_96 = [96, 72]
STATES = TrialState.WITHDRAWN, TrialState.COMPLETED


@pytest.fixture(autouse=True)
def _long_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    favour_large_batches(monkeypatch)
    with generous(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(probe, "_SHARE", 8.0)
        yield


def callback_of(bench: FrameworkBench, first_run: FirstRun = "predicted", **options: Any) -> Any:
    sizes = (NEXT_SIZE, SERVERS_SIZE, LARGE)
    job = bench.job(0.9, max_epochs=3, batch_sizes=sizes, policy=GP_VOI, first_run=first_run)
    return bench.callback(job, probe="auto", **options)


def test_first_run_trains_at_predicted_size_and_bears_cost_of_probe(
    bench: FrameworkBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, windows = seconds_and_joules(1.0, 10.0), list[str]()
    monkeypatch.setattr(monitor, "end_window", note_then(monitor.end_window, windows))
    summary = bench.folder.parent / "summary.md"
    monkeypatch.setenv("ZEUS_SUMMARY_FILE", str(summary))
    callback = callback_of(bench, lr_scaling="linear", on_failure="finish", energy_monitor=monitor)
    rates: list[float] = []

    def note() -> None:
        optimizer = training.trainer.optimizers[0] if bench.HAS_LOGGER else training.trainer.optimizer
        rates.append(optimizer.param_groups[0]["lr"])

    training = bench.training(callback, work=Work({1: note}), epochs=3, scores=(0.1, 0.9))
    script_rate = training.model._learning_rate if bench.HAS_LOGGER else training.trainer.args.learning_rate
    training.train()
    assert rates[-1] == pytest.approx(2 * script_rate)
    assert training.sizes == EPOCH_OF_96 * 2
    assert training.steps == (2 * len(EPOCH_OF_96), 3 * len(EPOCH_OF_96))
    assert (callback.trial.batch_size, callback.trial.trial_number, callback.lr_factor) == (LARGE, 2, 2.0)
    view = bench.view()
    probed, trained = view.trials
    assert (probed.batch_size, probed.epochs) == (SERVERS_SIZE, None)
    assert (trained.batch_size, trained.epochs) == (LARGE, 2)
    assert (probed.state, trained.state) == STATES
    assert "by its probe, 96 is expected to save" in (trained.reason or "")
    # Each window of the monitor takes a second, also the two of the withdrawn trial, and that of the calibrated probe.
    assert trained.time_s == windows.count("zeus_bso_trial") == 5
    assert trained.energy_j == 10 * trained.time_s
    assert view.probe is not None
    assert [each.batch_size for each in view.probe.sizes] == [NEXT_SIZE, SERVERS_SIZE, LARGE]
    assert training.left_behind(callback) == []
    assert training.script == (16, 1)
    assert summary.read_text().count("### ") == 1


def test_first_run_of_warm_job_trains_at_cheapest_size_by_epochs_of_other_job(mortal_bench: FrameworkBench) -> None:
    bench = mortal_bench  # on the shared server, a job of another test may be alike and have more runs
    sizes = (NEXT_SIZE, SERVERS_SIZE, LARGE)
    learns = bench.job(0.9, max_epochs=3, batch_sizes=sizes, default_batch_size=LARGE, policy=GP_VOI)
    bench.training(bench.callback(learns, probe="off"), epochs=3, scores=(0.9,)).train()
    known, bench.job_id = bench.job_id, f"{bench.job_id}-elsewhere"
    elsewhere = ReplayMonitor(repeat(Measurement(1.0, 10.0, "replayed")), GPUS.model_copy(update={"gpu_model": "H100"}))
    training = bench.training(callback_of(bench, "default", energy_monitor=elsewhere), epochs=3, scores=(0.9,))
    training.train()
    assert training.sizes == EPOCH_OF_96
    probed, trained = bench.view().trials
    assert (probed.state, trained.state) == STATES
    assert f"epochs as learned by job {known} on A40" in (trained.reason or "")


def test_server_that_cannot_store_the_probe_leaves_the_run_at_its_size(
    bench: FrameworkBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BsoClient, "store_probe", unreachable)
    callback = callback_of(bench)
    training = bench.training(callback, epochs=3, scores=(0.9,))
    training.train()
    assert training.sizes == EPOCH_OF_48
    trial = bench.only_trial()
    assert (trial.batch_size, trial.state) == (SERVERS_SIZE, TrialState.COMPLETED)


def test_run_without_server_after_its_probe_keeps_its_size_and_is_recorded_later(
    bench: FrameworkBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, requests = BsoClient.request_trial, []

    def request_once(client: BsoClient, *args: Any) -> Any:
        requests.append(args)
        return (request if len(requests) != 2 else unreachable)(client, *args)

    monkeypatch.setattr(BsoClient, "request_trial", request_once)
    callback = callback_of(bench, on_unreachable="raise")
    training = bench.training(callback, epochs=3, scores=(0.9,))
    training.train()
    assert training.sizes == EPOCH_OF_48
    assert callback.converged
    paid_s = callback.trial.time_s
    assert paid_s > 2
    bench.training(callback_of(bench), epochs=3, scores=(0.9,)).train()
    trials = bench.view().trials[:2]
    assert [(each.batch_size, each.state, each.time_s) for each in trials] == [
        (SERVERS_SIZE, TrialState.WITHDRAWN, None),
        (SERVERS_SIZE, TrialState.COMPLETED, paid_s),
    ]


def test_failed_probe_leaves_the_run_at_its_size(bench: FrameworkBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.Prober, "_visit", unreachable)
    callback = callback_of(bench)
    training = bench.training(callback, epochs=3, scores=(0.9,))
    training.train()
    assert training.sizes == EPOCH_OF_48
    assert [(each.trial_number, each.state) for each in bench.view().trials] == [(1, TrialState.COMPLETED)]


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("lightning", marks=QUIET),
        pytest.param("huggingface", marks=pytest.mark.skipif(IS_ABSENT, reason="needs the transformers")),
    ],
)
def test_training_at_predicted_size_equals_one_at_this_size_from_the_start(framework: str, tmp_path: Path) -> None:
    seen = []
    # Without an id, a job is made by its first registration.
    for job in (predicting(default_batch_size=64), predicting(first_run="predicted", job_id=None)):
        made: Any = import_module(f"tests.support.trapped_{framework}").Ran
        said: dict[str, Any] = {"job": job, "lr_scaling": "none"}
        folder = tmp_path / job.first_run
        folder.mkdir()
        if framework == "lightning":
            run = made(folder, "auto")
            run.said = said
            run.train()
            model, url = run.module.model, run.url
        else:
            run = made(folder, "auto", said=said)
            run.trainer.train()
            model, url = run.model, f"embedded://{folder / 'auto' / 'bso.sqlite3'}"
        with client_from_environment(url) as client:
            (found,) = client.list_jobs().jobs
            trials = client.show_job(found.job_id).trials
        assert [each.batch_size for each in trials] == ([64] if job.first_run == "default" else [OWN_SIZE, 64])
        assert set(model.sizes) == {64}
        seen.append((model.losses, rest(model, run.data)))
    assert seen[0] == seen[1]


def note_then(end: Callable[[str], Any], windows: list[str]) -> Callable[[str], Any]:
    def noted(name: str) -> Any:
        windows.append(name)
        return end(name)

    return noted
