"""The sentences that people are told of their trainings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.embedded import monitor
from zeus_plugins import BatchSizeOptimizer, JobSpec, ZeusBSOTrainFailError
from zeus_plugins.client import client_from_environment

# A target that is missed


def missed(url: str, job: JobSpec, metric: float) -> tuple[int, str]:
    """The size of a training that does not get to its target, and what its user is told."""
    with BatchSizeOptimizer(monitor(), url, job) as optimizer:
        size = optimizer.get_batch_size()
        optimizer.on_train_begin()
        with pytest.raises(ZeusBSOTrainFailError) as raised:
            optimizer.on_evaluate(metric)
    return size, str(raised.value)


@pytest.mark.parametrize(("target", "higher", "move"), [(0.97, True, "lower"), (0.1, False, "raise")])
def test_a_target_that_no_size_reaches_is_told_with_what_to_change(
    tmp_path: Path, target: float, *, higher: bool, move: str
) -> None:
    job = JobSpec(
        job_id="digits-1",
        job_id_prefix="digits",
        batch_sizes=(32, 64),
        default_batch_size=32,
        target_metric=target,
        higher_is_better_metric=higher,
        max_epochs=1,
    )
    url = f"embedded://{tmp_path / 'bso.sqlite3'}"
    told = {}
    for metric in (0.5, 0.75, 0.7, 0.6):
        size, text = missed(url, job, metric)
        told[metric] = size
        if len(set(told.values())) < 2:
            assert text.endswith("; launch the training again to try the next batch size")
    assert len(set(told.values())) == 2
    best = 0.75 if higher else 0.5
    assert text.endswith(
        f"; no batch size reached {target:g} in 4 trials, the best was {best:g} at {told[best]}: {move} the target or "
        "raise max_epochs, and start over under another job_id or after bso-server jobs delete digits-1"
    )
    with client_from_environment(url) as client:  # as it says
        client.delete_job("digits-1")
    assert missed(url, job, 0.5)[1].endswith("launch the training again to try the next batch size")


FAILING = """
from zeus_plugins.training.outcomes import show_in_one_paragraph, train_fail_error
show_in_one_paragraph()
show_in_one_paragraph()
{}
"""


@pytest.mark.parametrize(
    ("end", "is_one_line", "status"),
    [
        ("raise train_fail_error(None)", True, 75),
        ("raise train_fail_error(None, 'move the target')", True, 1),
        ("raise ValueError('a fault')", False, 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise train_fail_error(None)", False, 75),
    ],
)
def test_a_missed_target_is_one_paragraph_and_a_status_and_faults_keep_their_traceback(
    end: str, is_one_line: bool, status: int
) -> None:
    script = subprocess.run([sys.executable, "-c", FAILING.format(end)], capture_output=True, text=True, check=False)
    assert script.returncode == status
    said = script.stderr.splitlines()
    errors = ("zeus_plugins.errors.ZeusBSOTrainFailError: the training ended before the target", "ValueError: a fault")
    assert said[-1].startswith(errors)
    assert (len(said) == 1) == is_one_line
