"""Trainings without the callback by `ZEUS_DISABLED`."""

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
