"""Summaries of runs in the file that a CI system shows."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from markdown_it import MarkdownIt

from tests.support.contract_double import CONVERGED, ContractDouble
from tests.support.fake_trainer import FakeTrainer, active, on_each_rank
from tests.training.test_trial_run import begun
from zeus_plugins.protocol import JobView, TrialState
from zeus_plugins.training.announce import run_summary
from zeus_plugins.training.trial import TrialInfo

TRIAL = TrialInfo(
    job_id="nightly", batch_size=64, trial_number=3, reason="tried 64: a|b", time_s=12.0, energy_j=340.0, cost_j=270.0
)


def view_of(costs: list[float | None]) -> JobView:
    trials = [
        SimpleNamespace(trial_number=number, batch_size=32 * number, cost_j=cost_j, state=TrialState.COMPLETED)
        for number, cost_j in enumerate(costs, 1)
    ]
    savings = SimpleNamespace(claim="64 saves 21 % (10 to 30 %)", evidence="After 3 runs")
    return cast("JobView", SimpleNamespace(trials=trials, savings=savings))


def test_summary_is_a_table_with_the_verdict_and_one_bar_per_measured_run() -> None:
    text = run_summary(TRIAL, "target reached", "val_acc", view_of([400.0, None, 200.0]))
    html = MarkdownIt().enable("table").render(text)
    assert "<td>64: tried 64: a|b</td>" in html
    assert "<td>12 s and 340 J</td>" in html
    assert "<td>64 saves 21 % (10 to 30 %). After 3 runs</td>" in html
    bars = [line for line in text.splitlines() if "█" in line]
    assert [(line.split()[:2], line.count("█")) for line in bars] == [(["1", "32"], 40), (["3", "96"], 20)]


@pytest.mark.parametrize("variable", ["ZEUS_SUMMARY_FILE", "GITHUB_STEP_SUMMARY"])
def test_each_run_appends_its_summary_to_the_file_of_the_ci_system(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "summary.md"
    file.write_text("# Before\n\n")
    monkeypatch.setenv(variable, str(file))

    def train(port: FakeTrainer) -> None:
        run = begun(ContractDouble(CONVERGED), port)
        active(run).report_evaluation(lambda: 0.9, 1.0)
        run.finish()

    on_each_rank(2, train)
    text = file.read_text()
    assert text.startswith("# Before\n\n### Batch size of job mnist-1, trial 7\n")
    assert text.count("###") == 1


def test_summary_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZEUS_SUMMARY_FILE", str(tmp_path / "missing" / "summary.md"))
    run = begun(ContractDouble(CONVERGED))
    active(run).report_evaluation(lambda: 0.9, 1.0)
    with caplog.at_level(logging.WARNING):
        run.finish()
    assert "the summary of the run could not be written" in caplog.text
