"""Number of consecutive evaluations that must reach the target (`StopRule.judge`, in server and training)."""

from __future__ import annotations

import pytest

from zeus_plugins.protocol import EndReason, JobSpec, StopRule

HIT, MISS = 0.9, 0.1


def job(confirm: int) -> JobSpec:
    return JobSpec(
        job_id_prefix="mnist",
        batch_sizes=(32,),
        default_batch_size=32,
        target_metric=0.8,
        max_epochs=9,
        confirm=confirm,
    )


def end_of(confirm: int, *evaluations: tuple[float, float]) -> tuple[EndReason, float | None]:
    """Judge evaluations of (epoch, metric) until the first stop; return its reason and epoch."""
    rule = StopRule(max_epochs=9)
    for epoch, metric in evaluations:
        verdict = rule.judge(job(confirm), metric=metric, epochs=epoch, cost_j=1.0)
        if verdict.stop:
            return verdict.reason, epoch
        rule = verdict.rule
    return EndReason.KEEP_TRAINING, None


@pytest.mark.parametrize(
    ("confirm", "metrics", "epoch"),
    [
        (1, (MISS, HIT, HIT), 2),
        (2, (MISS, HIT, HIT), 3),
        (2, (HIT, MISS, HIT, HIT), 4),
        (3, (HIT, HIT, MISS, HIT, HIT), None),
        (3, (HIT, HIT, HIT), 3),
    ],
)
def test_target_counts_after_confirm_consecutive_evaluations(
    confirm: int, metrics: tuple[float, ...], epoch: int | None
) -> None:
    reason = EndReason.KEEP_TRAINING if epoch is None else EndReason.TARGET_REACHED
    assert end_of(confirm, *enumerate(metrics, 1)) == (reason, epoch)


@pytest.mark.parametrize(
    ("evaluations", "epoch"),
    [
        (((2, HIT), (2, HIT), (3, HIT)), 3),
        (((2, HIT), (1, HIT), (2, HIT)), None),
        (((2, HIT), (2, MISS), (3, HIT)), None),
        (((0.5, HIT), (1.0, HIT)), 1.0),
    ],
    ids=["again", "from before", "missed at the second time", "within an epoch"],
)
def test_repeated_epoch_counts_once_towards_confirmation(
    evaluations: tuple[tuple[float, float], ...], epoch: float | None
) -> None:
    assert end_of(2, *evaluations)[1] == epoch


def test_unconfirmed_target_does_not_count_after_the_last_epoch() -> None:
    assert end_of(2, (8, MISS), (9, HIT)) == (EndReason.MAX_EPOCHS_REACHED, 9)


def test_verdict_states_how_many_evaluations_reached_the_target() -> None:
    first = StopRule(max_epochs=9).judge(job(2), metric=HIT, epochs=3, cost_j=10.0)
    assert first.message == (
        "continue after 3 epochs: metric 0.9, target 0.8, reached in 1 of 2 evaluations in a row; 10 J spent"
    )
    second = first.rule.judge(job(2), metric=HIT, epochs=4, cost_j=20.0)
    assert second.message == (
        "target reached after 4 epochs: metric 0.9, target 0.8, reached in 2 of 2 evaluations in a row"
    )
