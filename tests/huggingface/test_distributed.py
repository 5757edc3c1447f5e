"""Two processes train together with the Trainer, which gets its data and arguments in many ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frameworks.test_two_processes import WORLD_SIZE, Ran, Start, batch_size_of, run_in
from tests.support.hf_bench import WAYS
from zeus_plugins.protocol import TrialState


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    yield from run_in(Start("hf_bench"), tmp_path_factory.mktemp("ran"), *WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_both_processes_train_at_size_of_server(ran: Ran, way: str) -> None:
    per_process = batch_size_of(way) // WORLD_SIZE // WAYS[way].get("accumulation", 1)
    for rank, seen in enumerate(ran.seen(way)):
        assert set(seen["sizes"][:-1]) == {per_process}
        assert (seen["converged"], seen["trial_number"]) == (True, 1)
        assert seen["steps"][0] == seen["steps"][1]
        assert seen["energy_rows"] == (1 if rank == 0 else 0)
        assert (seen["time_s"] > 0) is (rank == 0)
    (trial,) = ran.job(way).trials
    assert (trial.state, trial.metric) == (TrialState.COMPLETED, 0.5)
