"""The benchmark of batch sizes and learning rates, on one short training and on made-up costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import learning_rates
from benchmarks.learning_rates import SIZES, Cell, cells, chosen, cost_table, costs_of, main, read, total_cost, train
from benchmarks.reports import RESULTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_table_in_documentation_follows_from_kept_trainings() -> None:
    assert cost_table(costs_of(read(RESULTS / "learning_rates.json"))) in DOCUMENT.read_text("utf-8")


def test_measurement_continues_with_trainings_that_file_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trained = tmp_path / "rates.json", []

    def short(cell: Cell, seed: int) -> learning_rates.Training:
        trained.append(cell)
        return learning_rates.Training(cell.task, cell.batch_size, cell.factor, seed, True, 2, 1.0, 0.9)

    monkeypatch.setattr(learning_rates, "train", short)
    monkeypatch.setattr(learning_rates, "NAMES", ("tabular",))
    arguments = ["--file", str(file), "--seeds", "1", "--jobs", "1"]
    assert main(arguments) == 0
    kept = json.loads(file.read_text("utf-8"))
    assert trained == cells("tabular")
    kept["trainings"] = kept["trainings"][:-2]
    file.write_text(json.dumps(kept))
    assert main(arguments) == 0
    assert trained == [*cells("tabular"), *cells("tabular")[-2:]]
    assert "| tabular | `auto` | 1 | 1 | 1 | 1 | 1 |" in capsys.readouterr().out


def test_training_at_higher_rate_reaches_target_and_one_at_no_rate_does_not() -> None:
    fast, still = (train(Cell("tabular", 512, factor), 0) for factor in (8.0, 1e12))
    assert (fast.reached, still.reached) == (True, False)
    assert 1 < fast.epochs < 60
    assert still.metric is None


@pytest.mark.parametrize(("gain", "pays"), [(4.0, True), (1.0, False)])
def test_policy_with_rates_pays_only_if_rates_matter(gain: float, pays: bool) -> None:
    grid = cells("digits")[: 5 * len(SIZES)]
    costs = {cell: [(1.0 if number < len(SIZES) else 1.0 / gain, True)] for number, cell in enumerate(grid)}
    assert chosen(costs | {cell: [*runs, *runs] for cell, runs in costs.items()}, grid) == 1.0 / gain
    sizes, both = (
        total_cost(costs, options, np.random.default_rng(0), rate_deviation=0.4) for options in (grid[:5], grid)
    )
    assert (both < sizes) is pays
