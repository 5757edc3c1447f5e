"""Trainings from public reports, ten nights in a row with `on_failure="finish"`: no night ends without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from tests.support.frameworks import (  # noqa: F401 - a fixture
    TRAIN_IMAGES,
    FrameworkBench,
    Training,
    Work,
    make_bench_without_server,
)
from tests.support.lightning_bench import digits as lightning_digits
from zeus_plugins.client import client_from_environment
from zeus_plugins.protocol import GP_VOI, EndReason, JobView, Origin, TrialState

OWN = 16
NIGHTS = 10
SCORES = (0.5, 1.0)  # the target is 0.9, and a training has two epochs

MakeTraining = Callable[[Any, Work], Training]


def view(bench: FrameworkBench) -> JobView:
    with client_from_environment() as client:
        return client.show_job(bench.job_id)


def ten_nights(bench: FrameworkBench, make: MakeTraining, *, sizes: tuple[int, ...], **spec: Any) -> JobView:
    """Train each night, check that the night ends with a model and reports the size that it trained; return the job."""
    spec = {"target": 0.9, "default_batch_size": OWN, "max_epochs": 2, "policy": GP_VOI} | spec
    job = bench.job(higher_is_better_metric=True, batch_sizes=sizes, **spec)
    for _ in range(NIGHTS):
        work = Work()
        callback = bench.BatchSize(job, "score", energy_monitor=work.monitor, on_failure="finish")
        training = make(callback, work)
        training.train()
        assert all(bool(each.isfinite().all()) for each in training.model.parameters())
        assert callback.trial.is_over
        assert callback.trial.batch_size in training.sizes
        assert training.left_behind(callback) == []
    job_view = view(bench)
    assert {trial.batch_size for trial in job_view.trials} > {job.default_batch_size}
    return job_view


def tries_without_result(job: JobView) -> dict[int, list[TrialState]]:
    """Return the states of the trials without a result, by batch size."""
    found: dict[int, list[TrialState]] = {}
    for trial in job.trials:
        if trial.state in (TrialState.FAILED, TrialState.INFEASIBLE, TrialState.WITHDRAWN):
            found.setdefault(trial.batch_size, []).append(trial.state)
    return found


class AtMost(nn.Linear):
    """A layer that is written for few rows, as in finetrainers #132."""

    error: type[Exception] = ValueError

    def forward(self, images: Tensor) -> Tensor:
        if self.training and len(images) > 40:
            raise self.error(f"expected at most 40 rows, got {len(images)}")
        return super().forward(images)


class MemoryForFew(AtMost):
    error = torch.OutOfMemoryError


@pytest.mark.parametrize("layer", [AtMost, MemoryForFew])
def test_crash_at_other_size_is_trained_at_own_size(bench: FrameworkBench, layer: type[nn.Linear]) -> None:
    def make(callback: Any, work: Work) -> Training:
        training = bench.training(callback, work=work, epochs=2, scores=SCORES)
        training.model.network = layer(64, 10)
        return training

    job = ten_nights(bench, make, sizes=(OWN, 48, 84))
    failed = tries_without_result(job)
    assert set(failed) <= {48, 84}
    assert 1 <= max(map(len, failed.values())) <= 2
    after = job.trials[[trial.batch_size in failed for trial in job.trials].index(True) + 1]
    assert (after.batch_size, after.origin, after.state) == (OWN, Origin.FINISH, TrialState.COMPLETED)


def night_with_crash_at_48(bench: FrameworkBench, change: Callable[[Training, bool], None]) -> tuple[Any, Training]:
    """Train a night at the own size and one at 48; `change` changes each training, and lets the second one crash."""
    job = bench.job(higher_is_better_metric=True, batch_sizes=(OWN, 48), default_batch_size=OWN, max_epochs=2)
    for crashes in (False, True):
        work = Work()
        callback = bench.BatchSize(job, "score", energy_monitor=work.monitor, on_failure="finish", lr_scaling="linear")
        training = bench.training(callback, work=work, epochs=2, scores=SCORES)
        change(training, crashes)
        training.train()
    return callback, training


def crash_once(at: int) -> Callable[..., None]:
    calls = count(1)

    def call(*_: Any) -> None:
        if next(calls) == at:
            raise RuntimeError("the user's own")

    return call


def test_optimizer_that_module_makes_once_has_its_own_rate_after_crash(bench: FrameworkBench) -> None:
    if not bench.HAS_LOGGER:
        pytest.skip("Hugging Face's Trainer makes its optimizers")
    seen: list[tuple[float, int]] = []

    def change(training: Training, crashes: bool) -> None:
        sgd = torch.optim.SGD(training.model.parameters(), lr=0.01, momentum=0.9)
        crash = crash_once(3 if crashes else 0)

        def note(_: Any) -> None:
            seen.append((sgd.param_groups[0]["lr"], len(sgd.state)))
            crash()

        training.model.configure_optimizers = lambda: sgd
        training.model.on_before_optimizer_step = note

    night_with_crash_at_48(bench, change)
    at_48 = [number for number, (rate, _) in enumerate(seen) if rate == pytest.approx(0.03)]
    assert len(at_48) == 3
    assert seen[at_48[-1] + 1] == (pytest.approx(0.01), 0)


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_crash_in_backward_under_ddp_is_trained_at_own_size(
    bench: FrameworkBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bench.HAS_LOGGER:
        pytest.skip("a strategy of Lightning")
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # Lightning sets it, and it is removed again at the end of the test
    plain = Trainer.__init__
    ddp = {"strategy": "ddp", "devices": 1, "accelerator": "cpu"}
    monkeypatch.setattr(Trainer, "__init__", lambda *args, **options: plain(*args, **options | ddp))

    def change(training: Training, crashes: bool) -> None:
        crash = crash_once(3 if crashes else 0)
        # Before this, the gradient of the bias has come, so that the wrapper waits for the other one.
        training.model.network.weight.register_hook(lambda _: crash())

    try:
        callback, training = night_with_crash_at_48(bench, change)
    finally:
        torch.distributed.destroy_process_group()  # later tests of this process would find it
    assert (callback.trial.batch_size, callback.converged) == (OWN, True)
    assert training.sizes[:3] == [48] * 3


def test_crash_in_middle_of_training_restores_first_weights(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture
) -> None:
    job = bench.job(higher_is_better_metric=True, batch_sizes=(OWN, 48), default_batch_size=OWN, max_epochs=2)
    models: list[Any] = []
    seen: list[Tensor] = []

    def note() -> None:
        seen.append(models[-1].network.weight.detach().clone())

    # At 48, the error comes in the second epoch, and the next batch is the first one at the own size.
    crash = {1: note, 6: RuntimeError("the user's own"), 7: note}
    for events, scores in (({}, (0.5, 1.0)), (crash, (-1.0,))):
        work = Work(events)
        callback = bench.BatchSize(job, "score", energy_monitor=work.monitor, on_failure="finish")
        training = bench.training(callback, work=work, epochs=2, scores=scores)
        models.append(training.model)
        training.train()
    assert training.sizes == [48] * 3 + [24] + [48] * 2 + [OWN] * 10 + [8] + [OWN] * 10 + [8]
    assert torch.equal(*seen)
    assert "the user's own" in caplog.text
    assert "Traceback" in caplog.text
    _, crashed, finishing = view(bench).trials
    assert (crashed.state, crashed.end_reason, crashed.batch_size) == (TrialState.FAILED, EndReason.CRASHED, 48)
    assert (finishing.state, finishing.batch_size, finishing.epochs) == (TrialState.EXHAUSTED, OWN, 2)


@pytest.mark.parametrize("error", [RuntimeError("the user's own"), SystemExit(143)], ids=["crash", "signal"])
def test_crash_at_own_size_and_signal_at_any_size_are_raised(bench: FrameworkBench, error: BaseException) -> None:
    job = bench.job(higher_is_better_metric=True, batch_sizes=(OWN, 48), default_batch_size=OWN)
    is_signal = isinstance(error, SystemExit)
    for events in ({}, {2: error}) if is_signal else ({2: error},):
        work = Work(events)
        callback = bench.BatchSize(job, "score", energy_monitor=work.monitor, on_failure="finish")
        training = bench.training(callback, work=work)
        if events:
            with pytest.raises(type(error)) as raised:
                training.train()
            assert raised.value is error
        else:
            training.train()
    assert callback.trial.batch_size == (48 if is_signal else OWN)


class ClassesByItems(Sampler[list[int]]):
    """P classes × K samples: always 24 images, whatever `batch_size` says; each epoch has the declared length."""

    def __init__(self, batch_size: int = 24) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            yield [(24 * number + index) % TRAIN_IMAGES for index in range(24)]

    def __len__(self) -> int:
        return -(-TRAIN_IMAGES // self.batch_size)


def with_sampler(bench: FrameworkBench, callback: Any, work: Work, sampler: Any) -> Training:
    """Return a training on batches of this sampler."""
    if bench.HAS_LOGGER:
        data = DataLoader(lightning_digits()[0], batch_sampler=sampler)
        return bench.training(callback, work=work, epochs=2, scores=SCORES, data=data)
    from transformers import Trainer

    class WithSampler(Trainer):
        def get_train_dataloader(self) -> Any:
            data: Any = self.train_dataset
            return self.accelerator.prepare(DataLoader(data, batch_sampler=sampler, collate_fn=self.data_collator))

    return bench.training(callback, work=work, epochs=2, scores=SCORES, size=24, kind=WithSampler)


def test_size_that_sampler_ignores_is_left_out_after_one_try(bench: FrameworkBench) -> None:
    job = ten_nights(
        bench,
        lambda callback, work: with_sampler(bench, callback, work, ClassesByItems()),
        sizes=(12, 24, 84, 168),
        default_batch_size=24,
    )
    failed = tries_without_result(job)
    assert failed
    assert all(states == [TrialState.INFEASIBLE] for states in failed.values())
    assert {trial.batch_size for trial in job.trials if trial.state is TrialState.COMPLETED} == {24}
    refused = next(trial for trial in job.trials if trial.batch_size in failed)
    assert refused.end_reason is EndReason.REFUSED
    assert f"{refused.batch_size} cannot be trained as configured" in (refused.message or "")
    assert {arm.batch_size: arm.infeasible for arm in job.arms}[refused.batch_size] is EndReason.REFUSED


def test_delay_of_evaluations_in_steps_of_own_size_loses_no_night(bench: FrameworkBench) -> None:
    if bench.HAS_LOGGER:
        pytest.skip("eval_delay is an argument of Hugging Face's Trainer")

    def make(callback: Any, work: Work) -> Training:
        return bench.training(callback, work=work, epochs=2, scores=SCORES, validate_every=2, eval_delay=9)

    job = ten_nights(bench, make, sizes=(8, OWN, 48, 84))
    assert tries_without_result(job) == {}


def test_own_size_trains_bit_equal_to_a_training_without_callback(bench: FrameworkBench) -> None:
    weights = []
    for has_callback in (True, False):
        torch.manual_seed(5)
        work = Work()
        job = bench.job(
            higher_is_better_metric=True, target=2.0, batch_sizes=(OWN, 48), default_batch_size=OWN, max_epochs=2
        )
        callbacks = [bench.BatchSize(job, "score", energy_monitor=work.monitor, on_failure="finish")]
        training = bench.training(*callbacks * has_callback, work=work, epochs=2)
        training.train()
        weights.append(training.model.network.weight)
    assert torch.equal(*weights)


def test_lone_sample_of_last_batch_is_left_out_at_other_sizes(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in geo-deep-learning #113: 161 images are a multiple of 8, 20 and 32, and one more, but not of 14."""
    lone = []

    def make(callback: Any, work: Work) -> Training:
        training = bench.training(callback, work=work, epochs=2, scores=SCORES, size=14, samples=161)
        training.model.network = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        lone.append(training)
        return training

    job = ten_nights(bench, make, sizes=(8, 14, 20, 32), default_batch_size=14)
    assert tries_without_result(job) == {}
    assert all(trial.origin is not Origin.FINISH for trial in job.trials)
    assert {sum(training.sizes[: len(training.sizes) // 2]) for training in lone} == {160, 161}
    assert "the last batch of an epoch, a single sample, is left out" in caplog.text + capsys.readouterr().err


def test_target_out_of_reach_trains_once_a_night(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, said = [], []

    def make(callback: Any, work: Work) -> Training:
        said.append(caplog.text + capsys.readouterr().err)
        training = bench.training(callback, work=work, epochs=3, scores=(0.2, 0.24, 0.25))
        trained.append(training)
        return training

    job = ten_nights(bench, make, sizes=(8, OWN, 48), max_epochs=3)
    assert [training.epochs for training in trained] == [3] * NIGHTS
    assert all(trial.origin is not Origin.FINISH for trial in job.trials)
    assert "The target is out of reach at your own batch size: score missed it by 0.65, and moved by 0.01" in said[1]
    assert "16, has missed the target with all its epochs, too" in said[2]


@pytest.mark.parametrize(("target", "after_target"), [(0.9, "continue"), (2.0, "stop"), (None, "stop")])
def test_extra_epoch_of_callback_runs_after_the_trial(
    bench: FrameworkBench, target: float | None, after_target: str
) -> None:
    """As in Lightning #21347: weight averaging makes a further epoch to update the batch normalisation."""
    if not bench.HAS_LOGGER:
        pytest.skip("a callback of Lightning")
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    works = Work(), Work()
    job = bench.job(
        higher_is_better_metric=True, target=target, batch_sizes=(OWN, 48), default_batch_size=OWN, max_epochs=3
    )
    zeus = bench.BatchSize(
        job, "score", energy_monitor=works[0].monitor, after_target=after_target, on_failure="finish"
    )
    weights = []
    for callbacks, work in (([zeus], works[0]), ([], works[1])):
        torch.manual_seed(5)
        training = bench.training(
            *callbacks, StochasticWeightAveraging(0.05, 1), work=work, epochs=3, scores=(0.5, 1.0)
        )
        training.model.network = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        training.train()
        weights.append(torch.cat([each.flatten() for each in training.model.state_dict().values()]))
    assert training.epochs == 4
    assert torch.equal(*weights)


def test_crash_before_first_step_is_trained_at_own_size(bench: FrameworkBench) -> None:
    if not bench.HAS_LOGGER:
        pytest.skip("Hugging Face's Trainer makes optimizers within its loop")

    def schedule(optimizer: Any, steps: int) -> Any:
        assert steps >= 10, "too few steps for the phases of the schedule"
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)

    def make(callback: Any, work: Work) -> Training:
        training = bench.training(callback, work=work, epochs=2, scores=SCORES)
        training.model._scheduler = schedule
        return training

    job = ten_nights(bench, make, sizes=(8, OWN, 84))
    failed = tries_without_result(job)
    assert set(failed) == {84}
    assert len(failed[84]) <= 2


def test_crash_after_resume_continues_with_weights_of_checkpoint(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    job = bench.job(higher_is_better_metric=True, batch_sizes=(OWN, 48), default_batch_size=OWN, max_epochs=2)
    job = job.model_copy(update={"target_metric": 0.9})
    models: list[Any] = []
    seen: list[Tensor] = []

    def note() -> None:
        seen.append(models[-1].network.weight.detach().clone())

    # An epoch has four batches at 48. Its checkpoint holds the weights with which the fifth batch begins.
    killed = {5: note, 6: SystemExit(143)}
    crash = {1: note, 3: RuntimeError("the user's own"), 4: note}
    for events, checkpoint in (({}, None), (killed, None), (crash, 4)):
        work = Work(events)
        callback = bench.BatchSize(job, "score", energy_monitor=work.monitor, on_failure="finish")
        training = bench.training(callback, work=work, epochs=2, scores=(0.5, 1.0), save_every=0)
        models.append(training.model)
        with suppress(SystemExit):
            training.train(None if checkpoint is None else bench.checkpoint(checkpoint))
    assert training.sizes[:4] == [48] * 3 + [OWN]
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[2])
    said = caplog.text + capsys.readouterr().err
    assert f"The training begins again with the weights of the checkpoint at {OWN}, your own batch size" in said


def test_run_at_pinned_size_counts_only_while_it_is_pinned(bench: FrameworkBench) -> None:
    counted = []
    for sizes in ([8, OWN, 48], [8, OWN, 48], [48], [8, OWN, 48]):
        work = Work()
        said: dict[str, Any] = {"monitor": "score", "mode": "max", "target": 0.9, "job_id": bench.job_id}
        callback = bench.BatchSize(batch_sizes=sizes, energy_monitor=work.monitor, **said)
        bench.training(callback, work=work, epochs=2, scores=SCORES).train()
        at_48 = [trial for trial in view(bench).trials if trial.batch_size == 48]
        counted.append([trial.state is TrialState.COMPLETED for trial in at_48][:2])
    # A pinned run has the rate of the script, and the run before it a scaled one.
    assert counted == [[], [True], [False, True], [True, False]]


def test_scripts_with_two_rules_in_turn_keep_the_runs_of_each(bench: FrameworkBench) -> None:
    rules = ["auto", "none"]
    ran: dict[str, list[int]] = {rule: [] for rule in rules}
    job = bench.job(
        higher_is_better_metric=True, target=0.9, batch_sizes=(8, OWN, 48), default_batch_size=OWN, max_epochs=2
    )
    for night in range(NIGHTS):
        rule, work = rules[night % 2], Work()
        callback = bench.BatchSize(job, "score", energy_monitor=work.monitor, on_failure="finish", lr_scaling=rule)
        bench.training(callback, work=work, epochs=2, scores=SCORES).train()
        ran[rule].append(night + 1)
        counted = [trial.trial_number for trial in view(bench).trials if trial.state is not TrialState.WITHDRAWN]
        own = [trial.trial_number for trial in view(bench).trials if trial.batch_size == OWN]
        assert counted == sorted({*ran[rule], *own})
    assert all(set(numbers) - set(own) for numbers in ran.values())  # both rules have tried other sizes
