"""Energy in the trainer's own loggers, without a server."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.frameworks import STEPS_OF_16, VALIDATION, FrameworkBench, Queued, Training, Work, energy_rows
from tests.support.job_bench import NEVER
from tests.support.versions import is_older

EPOCH = STEPS_OF_16 + VALIDATION


def metered(bench: FrameworkBench, work: Work, **options: Any) -> tuple[Training, Any]:
    """Return a training with an energy callback, and the callback."""
    meter = bench.Energy(work.monitor)
    return bench.training(meter, work=work, **options), meter


def test_each_epoch_and_totals_are_logged(bench: FrameworkBench, caplog: pytest.LogCaptureFixture) -> None:
    training, meter = metered(bench, Work(), epochs=2)
    with caplog.at_level(logging.INFO, logger="zeus_plugins.energy"):
        training.train()
    assert training.logged("zeus/energy_j") == energy_rows(EPOCH, EPOCH)
    assert (meter.time_s, meter.energy_j) == (2.0 * EPOCH, 20.0 * EPOCH)
    assert caplog.text.count("energy of the training: counted steps") == 1


@pytest.mark.parametrize(("save_every", "checkpoint"), [(0, 11), (7, 14)], ids=["after an epoch", "within an epoch"])
def test_resumed_training_continues_totals(bench: FrameworkBench, save_every: int, checkpoint: int) -> None:
    if save_every and type(bench).__module__.endswith("lightning_bench") and is_older("lightning", "2.6"):
        pytest.skip("lightning before 2.6 trains one batch again when it resumes within an epoch")
    options = {"epochs": 3, "save_every": save_every}
    first, _ = metered(bench, Work({18: SystemExit(143)}), **options)
    with pytest.raises(SystemExit):
        first.train()
    resumed, _ = metered(bench, Work(), **options)
    resumed.train(bench.checkpoint(checkpoint))
    # Steps that were trained again count once: the steps after the checkpoint are lost.
    assert len(resumed.sizes) == 3 * STEPS_OF_16 - checkpoint
    kept = checkpoint // STEPS_OF_16 if bench.HAS_LOGGER else 0  # The Trainer's checkpoints hold its logs.
    assert resumed.logged("zeus/energy_j") == energy_rows(EPOCH, EPOCH, EPOCH)[kept:]


def test_error_closes_window_and_next_training_starts_from_zero(bench: FrameworkBench) -> None:
    error = RuntimeError("the user's own")
    work = Work({STEPS_OF_16 + 2: error})
    meter = bench.Energy(work.monitor)
    with pytest.raises(RuntimeError) as raised:
        bench.training(meter, work=work, epochs=2).train()
    assert raised.value is error
    assert work.monitor.open_windows == []
    assert meter.time_s == EPOCH
    for _ in range(2):
        again = bench.training(meter, work=work, epochs=2)
        again.train()
        assert again.logged("zeus/energy_j") == energy_rows(EPOCH, EPOCH)
        assert meter.time_s == 2 * EPOCH


def test_machine_is_measured_by_default(bench: FrameworkBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_ESTIMATED_POWER_W", "50")  # The variable serves a training without a GPU.
    meter = bench.Energy()
    bench.training(meter).train()
    assert meter.time_s > 0
    # At most the cores of the whole machine were at work.
    assert 0 < meter.energy_j <= 1.1 * 50.0 * meter.time_s


def test_totals_start_at_checkpoint_without_totals(bench: FrameworkBench) -> None:
    bench.training(epochs=2, save_every=0).train()
    training, _ = metered(bench, Work(), epochs=2)
    training.train(bench.checkpoint(STEPS_OF_16))
    assert training.logged("zeus/energy_j") == energy_rows(EPOCH)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_both_callbacks_measure_side_by_side(bench: FrameworkBench, is_first: bool) -> None:
    work = Work()
    optimizer = bench.callback(bench.job(0.0, max_epochs=1), energy_monitor=work.monitor)
    meter = bench.Energy(work.monitor)
    both = [meter, optimizer] if is_first else [optimizer, meter]
    training = bench.training(*both, work=work, epochs=1)
    training.train()
    assert training.sizes == [48, 48, 48, 24]
    assert training.logged("zeus/energy_j") == energy_rows(4 + VALIDATION)
    assert meter.time_s == bench.only_trial().time_s == 4.0 + VALIDATION
    assert training.left_behind(meter, optimizer) == []
    assert work.monitor.open_windows == []


@pytest.mark.parametrize("depth", [3, 20])
def test_queued_work_of_an_epoch_is_measured_with_the_epoch(
    bench: FrameworkBench, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    work = Queued(depth)
    waits: list[int] = []

    def synchronize() -> None:
        work.drain()
        waits.append(work.batches)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    meter = bench.Energy(work.monitor)
    optimizer = bench.callback(bench.job(NEVER, max_epochs=2), energy_monitor=work.monitor, on_failure="stop")
    training = bench.training(meter, optimizer, work=work, epochs=2)
    training.train()
    assert training.logged("zeus/energy_j") == energy_rows(4 + VALIDATION, 4 + VALIDATION)
    assert bench.only_trial().time_s == 2.0 * (4 + VALIDATION)
    assert len(waits) == 6, "each callback waits before its first window and at the end of each epoch"
