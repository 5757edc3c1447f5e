"""Learning rates that a module or a callback of Lightning sets at another batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.job_bench import NEVER
from tests.support.lightning_bench import QUIET, Bench, Classifier, make_bench, quiet_trainer, train_loader  # noqa: F401 - a fixture
from tests.support.odd_sizes import RateFromSize, TwoLayers, Unfreezing

pytestmark = QUIET


def run_at_another_size(bench: Bench, make: Callable[[], Any], *others: Callable[[], Any], **options: Any) -> Any:
    """Train at twice the script's size, with the rates scaled linearly; return module and callback."""
    job = bench.job(NEVER, max_epochs=2, batch_sizes=(16, 32), default_batch_size=16)
    for size in (16, 32):  # the first size is the script's
        module, callback = make(), bench.callback(job, lr_scaling="linear", on_failure="stop")
        data = [] if isinstance(module, RateFromSize) else [train_loader()]
        quiet_trainer(callback, *(each() for each in others), max_epochs=2, **options).fit(module, *data)
        assert callback.trial.batch_size == size
    return module, callback


def test_module_computing_the_rate_from_the_batch_size_is_not_scaled_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    module, callback = run_at_another_size(bench, RateFromSize)
    assert set(module.seen_rates) == {0.2}
    assert callback.lr_factor == 1.0
    assert module.batch_size == 16
    assert caplog.text.count("lr_scaling is left out: the module computes its learning rate") == 1


@pytest.mark.parametrize(("rate", "scaled"), [(0.05, 0.1), (None, 0.02)], ids=["its own", "a tenth of the first"])
def test_parameter_groups_added_by_finetuning_are_scaled(bench: Bench, rate: float | None, scaled: float) -> None:
    module, _ = run_at_another_size(bench, TwoLayers, lambda: Unfreezing(rate))
    assert module.all_rates == [[0.2], pytest.approx([0.2, scaled])]
