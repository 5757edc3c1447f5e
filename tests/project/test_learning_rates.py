"""The benchmark of batch sizes and learning rates, on one short training and on made-up costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import learning_rates
from benchmarks.learning_rates import Cell, Training, cells, cost_of, cost_table, main, read, train
from benchmarks.reports import RESULTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_table_in_documentation_follows_from_kept_trainings() -> None:
    assert cost_table(read(RESULTS / "learning_rates.json")) in DOCUMENT.read_text("utf-8")


def test_measurement_continues_with_trainings_that_file_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trained = tmp_path / "rates.json", []

    def short(cell: Cell, seed: int) -> Training:
        trained.append(cell)
        return Training(cell.task, cell.batch_size, cell.factor, seed, True, 2, 1000)

    monkeypatch.setattr(learning_rates, "train", short)
    monkeypatch.setattr(learning_rates, "RULES", {"tabular": "sqrt"})
    arguments = ["--file", str(file), "--seeds", "1"]
    assert main(arguments) == 0
    kept = json.loads(file.read_text("utf-8"))
    assert trained == cells("tabular")
    kept["trainings"] = kept["trainings"][:-2]
    file.write_text(json.dumps(kept))
    assert main(arguments) == 0
    assert trained == [*cells("tabular"), *cells("tabular")[-2:]]
    assert "| tabular | 32 | sqrt | 1 | 1 | 1 | 1 | 1 | 1 | 1 | 0 % | 0 % | 0 % |" in capsys.readouterr().out


def test_training_at_higher_rate_reaches_target_and_one_at_no_rate_does_not() -> None:
    fast, still = (train(Cell("tabular", 512, factor), 0) for factor in (8.0, 1e12))
    assert (fast.reached, still.reached) == (True, False)
    assert 1 < fast.epochs < 60
    assert still.epochs == 1


def test_cost_of_runs_without_target_is_paid_by_runs_that_reach_it() -> None:
    cell = Cell("digits", 32, 1.0)
    runs = [Training("digits", 32, 1.0, seed, seed < 2, 1, 100 * (seed + 1)) for seed in range(3)]
    assert cost_of(runs, cell) == 300
    assert cost_of(runs[2:], cell) == float("inf")
