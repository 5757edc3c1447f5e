"""The benchmark of batch sizes and learning rates, on one short training and on made-up costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import learning_rates
from benchmarks.learning_rates import Cell, cells, chosen, cost_table, costs_of, main, read, train
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
    arguments = ["--file", str(file), "--seeds", "1"]
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


def test_best_cell_is_chosen_on_other_seeds() -> None:
    lucky, steady = Cell("digits", 32, 1.0), Cell("digits", 64, 1.0)
    costs = {lucky: [(1.0, True), (9.0, True), (9.0, True)], steady: [(4.0, True)] * 3}
    assert chosen(costs, [lucky, steady]) == 4.0
