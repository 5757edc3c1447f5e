"""Trainings without the callback by `ZEUS_DISABLED`, and jobs that state single fields."""

from __future__ import annotations

import pytest

from tests.support.frameworks import FrameworkBench


def test_variable_turns_the_callback_off_for_a_night(
    bench: FrameworkBench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ZEUS_DISABLED", "1")
    callback = bench.guessing(0.5)
    training = bench.training(callback, epochs=2, scores=(0.9,))
    with caplog.at_level("INFO"):
        training.train()
    assert (callback.has_trial, training.epochs, bench.is_registered()) == (False, 2, False)
    shown = capsys.readouterr()
    assert (caplog.text or shown.out + shown.err).count("ZEUS_DISABLED is set: this training has its own") == 1
    assert training.left_behind(callback) == []
    monkeypatch.setenv("ZEUS_DISABLED", "0")
    callback = bench.guessing(0.5)
    bench.training(callback, epochs=2, scores=(0.9,)).train()
    assert callback.has_trial


def test_single_fields_of_a_job_revise_it(bench: FrameworkBench) -> None:
    for fields in (None, {"eta_knob": 0, "controls": "off"}, {"batch_sizes": [24]}):
        callback = bench.guessing(0.5, job=fields)
        bench.training(callback, epochs=2, scores=(0.1, 0.9)).train()
        assert callback.converged
    job = bench.view().job
    assert (job.eta_knob, job.controls, job.batch_sizes, job.default_batch_size) == (0, 0, (24,), 24)
    assert bench.view().trials[-1].batch_size == 24
    callback = bench.guessing(0.5, job={"batch_sizes": [16]})  # the script's size, not the earlier pin
    bench.training(callback, epochs=2, scores=(0.9,)).train()
    assert (callback.trial.batch_size, bench.view().job.default_batch_size) == (16, 16)


def test_pin_ends_with_the_first_launch_without_it(bench: FrameworkBench) -> None:
    def night(batch_sizes: list[int] | None) -> tuple[int, tuple[int, ...]]:
        callback = bench.guessing(0.5, batch_sizes=batch_sizes, on_failure="stop")
        bench.training(callback, epochs=2, scores=(0.1, 0.9)).train()
        return callback.trial.batch_size, bench.view().job.batch_sizes

    own, sizes = night(None)
    assert own == 16
    assert len(sizes) > 2
    assert night([24]) == (24, (24,))
    assert night(None)[1] == sizes
    assert bench.view().job.default_batch_size == own
