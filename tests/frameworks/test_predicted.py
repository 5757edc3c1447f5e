"""The first run of a job takes the size that its probe predicts, before the first optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.frameworks import FrameworkBench, Work
from tests.support.job_bench import NEXT_SIZE, SERVERS_SIZE
from zeus_plugins.protocol import GP_VOI, TrialState
from zeus_plugins.training import probe

LARGE = 96
EPOCH_OF_96 = [96, 72]


@pytest.fixture(autouse=True)
def _probes_favour_large_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a pass of any size take equally long, and a probe take a whole epoch, because epochs of tests are short."""
    visit = probe.Prober._visit

    def visited(prober: Any, passes: Any, size: int, count: int) -> None:
        visit(prober, passes, size, count)
        prober._timings[size] = probe.Timing(1.0)

    monkeypatch.setattr(probe.Prober, "_visit", visited)
    monkeypatch.setattr(probe, "_SHARE", 1.0)
    monkeypatch.setattr(probe.Prober, "_left_s", lambda *_: 60.0)
    yield


def predicting(bench: FrameworkBench, **options: Any) -> Any:
    sizes = (NEXT_SIZE, SERVERS_SIZE, LARGE)
    job = bench.job(0.9, max_epochs=3, batch_sizes=sizes, policy=GP_VOI, first_run="predicted")
    return bench.callback(job, probe="auto", **options)


def test_first_run_trains_at_predicted_size(bench: FrameworkBench) -> None:
    callback = predicting(bench, lr_scaling="linear")
    training = bench.training(callback, epochs=3, scores=(0.1, 0.9))
    training.train()
    assert training.sizes == EPOCH_OF_96 * 2
    assert (callback.trial.batch_size, callback.trial.trial_number, callback.lr_factor) == (LARGE, 2, 2.0)
    probed, trained = bench.view().trials
    assert (probed.batch_size, probed.state, probed.epochs) == (SERVERS_SIZE, TrialState.WITHDRAWN, None)
    assert (trained.batch_size, trained.state, trained.epochs) == (LARGE, TrialState.COMPLETED, 2)
    assert "by its probe, 96 is expected to save" in (trained.reason or "")
