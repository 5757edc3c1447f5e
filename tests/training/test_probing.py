"""Probes: arithmetic, bounds, refused trainings, and plain loops."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.contract_double import ContractDouble
from tests.support.frameworks import use_one_thread  # noqa: F401 - pytest finds the fixture by its name
from tests.support.job_bench import seconds_and_joules
from tests.support.reporting import Flaky, training
from tests.support.sessions import GPUS, JOB, TRIAL, monitor_of
from tests.support.trapped import (
    OWN_SIZE,
    SIZES,
    Noisy,
    Trapped,
    favour_large_batches,
    generous,
    predicting,
    rest,
    seed,
    unreachable,
)
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.local import LocalServer
from zeus_plugins.protocol import GpuConfig, Probe, ProbedSize, TrialId, TrialProbe, TrialState
from zeus_plugins.training import probe
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.passes import Passes
from zeus_plugins.training.port import TrainerPort
from zeus_plugins.training.probe import (
    GradientSums,
    Prober,
    Timing,
    epoch_costs,
    noise_scale,
    outwards,
)

# --- arithmetic -------------------------------------------------------------------------------------------------------

# Gradients (1, 0) and (1, 2): squared norms 1 and 5, sum (2, 2).
PAIR = GradientSums(passes=2, squares=6.0, square_of_sum=8.0)


def test_signal_is_product_of_pairs_and_noise_is_the_rest() -> None:
    assert PAIR.signal == 1.0
    assert PAIR.noise(samples=4) == 4 * (3.0 - 1.0)


def test_noise_scale_of_a_single_group_has_a_minimum_error() -> None:
    assert noise_scale([PAIR], 4) == (8.0, math.hypot(1.6, 1.0))


def test_noise_scale_pools_groups_before_dividing() -> None:
    # A second group with |G|² = 3 and tr Σ = 4·(5 − 3) = 8; the means are 2 and 8.
    other = GradientSums(passes=2, squares=10.0, square_of_sum=16.0)
    scale, error = noise_scale([PAIR, other], 4) or (0.0, 0.0)
    assert scale == 4.0
    assert error == pytest.approx(math.hypot(1.6, 1.0 / 2 / math.log(2)))  # a standard error of 1 in 2


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(GradientSums(2, 6.0, 6.0), id="no signal"),
        pytest.param(GradientSums(2, 6.0, 5.0), id="negative signal"),
        pytest.param(GradientSums(2, 2.0, 4.0), id="no noise"),
        pytest.param(GradientSums(2, math.inf, math.inf), id="overflow"),
    ],
)
def test_noise_scale_is_unknown_without_signal_noise_or_numbers(group: GradientSums) -> None:
    assert noise_scale([group], 4) is None
    assert noise_scale([], 4) is None


def test_sizes_are_visited_outwards_from_the_scripts_size() -> None:
    assert outwards(16, [64, 32, 8, 4]) == [16, 8, 32, 4, 64]


def test_overhead_of_a_real_epoch_is_added_to_each_step() -> None:
    splits = {16: BatchSplit(16, 1), 32: BatchSplit(32, 1), 128: BatchSplit(32, 4), 64: BatchSplit(64, 1)}
    timings = {16: Timing(0.1, 0.0, 100.0), 32: Timing(0.15, 0.2, 200.0)}
    real = {"steps": 100, "time_s": 12.0, "evaluation_s": 3.0, "power_w": 50.0}
    own, double, accumulated = epoch_costs(timings, splits, 16, **real)
    # 0.12 s per step, of which 0.02 s are not part of the pass; evaluations are equal at each size.
    assert (own.batch_size, own.time_s, own.error) == (16, pytest.approx(15.0), 0.1)
    assert own.energy_j == pytest.approx(750.0)
    assert (double.batch_size, double.time_s) == (32, pytest.approx(50 * 0.17 + 3))
    # Passes drew twice the power of passes at the script's size, where an epoch drew 50 W.
    assert double.energy_j == pytest.approx(50 * 0.17 * 100 + 3 * 50)
    assert double.error == pytest.approx(math.hypot(0.1, 0.05, 0.2))
    assert (accumulated.batch_size, accumulated.time_s) == (128, pytest.approx(12.5 * (4 * 0.15 + 0.02) + 3))


def test_costs_of_passes_alone_have_half_of_the_hidden_time_as_their_error() -> None:
    splits = {16: BatchSplit(16, 1), 32: BatchSplit(32, 1)}
    real = {"steps": 100, "time_s": 15.0, "evaluation_s": 0.0, "power_w": 50.0}
    own, double = epoch_costs({16: Timing(0.1), 32: Timing(0.2)}, splits, 16, **real, hidden_s=0.1)
    assert own.error == 0.1
    assert double.time_s == pytest.approx(50 * 0.25)
    # With 0.1 s more in each step, the times are as 0.3 to 0.2 rather than 0.2 to 0.1.
    assert double.error == pytest.approx(math.hypot(0.1, 0.05, math.log((0.2 / 0.1) / (0.3 / 0.2)) / 2))


def test_overhead_of_unknown_kind_widens_the_error() -> None:
    splits = {16: BatchSplit(16, 1), 32: BatchSplit(32, 1)}
    real = {"steps": 100, "time_s": 20.0, "evaluation_s": 0.0, "power_w": 50.0}
    timings = {16: Timing(0.1), 32: Timing(0.1)}
    own, double = epoch_costs(timings, splits, 16, **real, is_ambiguous=True)
    assert own.error == 0.1
    # Either 0.1 s of each step outside the pass, or 0.1 s per 16 samples.
    assert double.error == pytest.approx(math.hypot(0.1, 0.05, math.log(0.2 / 0.3) / 2))


# --- bounds and refusals ----------------------------------------------------------------------------------------------


class Trainer:
    """A trainer of a linear model in one process, with replaceable passes.

    Attributes:
        sizes: Number of samples of each pass.
        said: Lines for the user.
        module: The model, which a test may replace.
    """

    rank, world_size, broadcast = 0, 1, None

    def __init__(self, *, samples: int = 16000, batch_size: int = 16, dataset: Any = None, **loading: Any) -> None:
        x, y = torch.randn(samples, 4), torch.randn(samples, 1)
        self.module: nn.Module = nn.Linear(4, 1)
        self.loader: Any = DataLoader(dataset or TensorDataset(x, y), batch_size, **loading)
        self.batches = samples / batch_size
        self.sizes: list[int] = []
        self.said: list[str] = []
        self.before_pass: Callable[[int], None] = lambda _: None

    def step(self, batch: list[Tensor]) -> None:
        x, y = batch
        self.sizes.append(len(x))
        self.before_pass(len(x))
        (self.module(x) - y).square().mean().backward()

    def passes(self) -> Passes:
        return Passes(step=self.step, model=self.module, loader=self.loader, batches=self.batches)

    def prober(self, *sizes: int) -> Prober:
        splits = {size: BatchSplit(size, 1) for size in (16, *sizes)}
        return Prober(cast("TrainerPort", self), splits, 16, None, self.said.append)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock moved only by the test."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: now.s, perf_counter=lambda: now.s))
    return now


def test_probe_takes_at_most_a_share_of_the_samples(clock: SimpleNamespace) -> None:
    trainer = Trainer()

    def pass_takes(size: int) -> None:
        clock.s += size / 1e6

    trainer.before_pass = pass_takes
    prober = trainer.prober(4, 8, 32, 64, 128, 256, 512)
    prober.time_passes()
    first = sum(trainer.sizes)
    assert trainer.sizes[0] == 16
    assert {4, 8, 16, 32, 64} <= set(trainer.sizes)
    assert first <= 0.05 * 0.75 * 16000
    prober.finish(clock.s + 1.0, epochs=1, trains_on=True)
    assert first < sum(trainer.sizes) <= 0.05 * 16000
    assert trainer.said == [f"probed {len(set(trainer.sizes))} sizes in {first / 1e6:.2g} s"]


def test_probe_takes_at_most_a_minute(clock: SimpleNamespace) -> None:
    trainer = Trainer(samples=10**6)

    def pass_takes(size: int) -> None:
        clock.s += size / 16

    trainer.before_pass = pass_takes
    prober = trainer.prober(8, 32, 64, 128, 256)
    prober.time_passes()
    assert {8, 16, 32} <= set(trainer.sizes)
    assert clock.s <= 45
    prober.finish(clock.s + 1.0, epochs=1, trains_on=True)
    assert clock.s <= 60


def test_probe_takes_at_most_a_share_of_the_time_of_an_epoch(clock: SimpleNamespace) -> None:
    trainer = Trainer()

    def pass_takes(_: int) -> None:
        clock.s += 0.01

    trainer.before_pass = pass_takes
    prober = trainer.prober(*range(1, 16))
    prober.time_passes()
    # An epoch has 1000 batches.
    assert 0.1 < clock.s <= 0.05 * 1000 * 0.01


def test_slow_first_size_is_left_at_the_time_limit_of_the_probe(clock: SimpleNamespace) -> None:
    trainer = Trainer(samples=10**6)

    def pass_takes(_: int) -> None:
        clock.s += 30

    trainer.before_pass = pass_takes
    trainer.prober(8, 32).time_passes()
    assert trainer.sizes == [16, 16]


def test_scripts_size_without_memory_is_left_to_the_training() -> None:
    trainer = Trainer()

    def run_out(_: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.before_pass = run_out
    prober = trainer.prober(8, 32)
    prober.time_passes()
    assert trainer.said == ["batch sizes are not probed: a pass over 16 samples runs out of memory"]
    assert trainer.sizes == [16]
    assert not prober.is_open


def test_epoch_too_short_for_a_probe_is_not_probed() -> None:
    trainer = Trainer(samples=320)
    prober = trainer.prober(8, 32)
    prober.time_passes()
    assert (trainer.sizes, trainer.said, prober.is_open) == ([], [], False)


@pytest.mark.usefixtures("clock")
def test_size_without_memory_is_reported_and_larger_sizes_are_left_out() -> None:
    trainer = Trainer(samples=160_000)

    def run_out(size: int) -> None:
        if size >= 64:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.before_pass = run_out
    prober = trainer.prober(8, 32, 64, 128)
    before = [each.clone() for each in trainer.module.parameters()]
    prober.time_passes()
    prober.finish(1.0, epochs=1, trains_on=False)
    found = prober.result(GPUS, 100.0)
    assert found.out_of_memory == 64
    assert {each.batch_size for each in found.sizes} == {8, 16, 32}
    assert trainer.sizes.count(64) == 1
    assert 128 not in trainer.sizes
    assert trainer.said[0].endswith("; 64 runs out of memory")
    for one, other in zip(before, trainer.module.parameters(), strict=True):
        assert torch.equal(one, other)
        assert other.grad is None


def test_noise_scale_comes_from_the_gradients_of_the_passes(clock: SimpleNamespace) -> None:
    class Slope(nn.Module):
        """Module in which the gradient of the parameter is the mean of the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=1, keepdim=True) * self.slope

    trainer = Trainer()
    trainer.module, means = Slope(), list[float]()

    def step(batch: list[Tensor]) -> None:
        means.append(float(batch[0].mean()) + 1.0)
        (trainer.module(batch[0] + 1.0)).mean().backward()

    trainer.step = step  # type: ignore[method-assign]  # another loss
    prober = trainer.prober(8, 32)
    prober.time_passes()
    means.clear()
    prober.finish(clock.s + 1.0, epochs=1, trains_on=True)
    scale = prober.result(GPUS, 100.0).critical_batch_size
    assert len(means) == 32
    groups = [means[first : first + 8] for first in range(0, 32, 8)]
    signal = sum(sum(group) ** 2 - sum(each**2 for each in group) for group in groups) / (4 * 8 * 7)
    mean_square = sum(each**2 for each in means) / 32
    # Batches of 16 remain, 32 of the largest.
    assert scale == pytest.approx(16 * (mean_square - signal) / signal, rel=1e-3)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.randn(4), torch.randn(1))] * 1000)


class Generating(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.generate(x)

    def generate(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Reading(nn.Linear):
    """Module that holds an iterator."""

    def __init__(self, numbers: Any) -> None:
        super().__init__(4, 1)
        self.numbers = numbers


def fail(_: int) -> None:
    raise ValueError("of the step")


def lazily(trainer: Trainer) -> None:
    trainer.module = nn.LazyLinear(1)


def compiling(trainer: Trainer) -> None:
    trainer.module.compile(backend="eager")


def generating(trainer: Trainer) -> None:
    trainer.module = Generating(4, 1)


def reading(trainer: Trainer) -> None:
    trainer.module = Reading(itertools.count())


def failing(trainer: Trainer) -> None:
    trainer.before_pass = fail


def unbatched(trainer: Trainer) -> None:
    trainer.loader = DataLoader(trainer.loader.dataset, batch_size=None)


def prebatched(trainer: Trainer) -> None:
    batches = [list(range(first, first + 16)) for first in range(0, 16000, 16)]
    trainer.loader = DataLoader(trainer.loader.dataset, batch_sampler=batches)


def streaming(trainer: Trainer) -> None:
    trainer.loader = DataLoader(Stream(), 16)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lazily, "a lazy module takes its shape from its first batch"),
        (compiling, "a compiled model is compiled again for other sizes"),
        (generating, "its step generates samples"),
        (reading, "its state includes a count, which cannot be rewound"),
        (failing, "ValueError: of the step"),
        (unbatched, "its loader does not state a batch size"),
        (prebatched, "its loader does not state a batch size"),
        (streaming, "its data are a stream"),
    ],
)
def test_training_with_doubtful_side_effects_is_not_probed(spoil: Callable[[Trainer], None], reason: str) -> None:
    trainer = Trainer()
    spoil(trainer)
    names, state = set(vars(trainer.module)), torch.get_rng_state()
    prober = trainer.prober(8, 32)
    prober.time_passes()
    assert trainer.said == [f"batch sizes are not probed: {reason}"]
    assert not prober.is_open
    assert set(vars(trainer.module)) == names
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in trainer.module.parameters())


# --- Plain loops ------------------------------------------------------------------------------------------------------


class Loop:
    """Plain training of two epochs."""

    def __init__(self, folder: Path, *, has_batch_norm: bool = True, **loading: Any) -> None:
        seed()
        self.data, self.model = Noisy(), Trapped(has_batch_norm=has_batch_norm)
        self.loader = DataLoader(self.data, OWN_SIZE, shuffle=True, **loading)
        self.job = JobSpec(
            job_id="job",
            job_id_prefix="job",
            batch_sizes=SIZES,
            default_batch_size=OWN_SIZE,
            target_metric=0.5,
            max_epochs=3,
        )
        self.url = f"embedded://{folder / 'bso.sqlite3'}"

    def step(self, batch: dict[str, Tensor]) -> None:
        self.model(**batch)["loss"].backward()

    def train(self, *, probes: bool, epochs: int = 2) -> None:
        adam = torch.optim.Adam(self.model.parameters(), 0.01)
        with BatchSizeOptimizer(seconds_and_joules(1.0, 10.0), self.url, self.job) as optimizer:
            self.loader.batch_sampler.batch_size = optimizer.get_batch_size()  # type: ignore[union-attr]
            optimizer.on_train_begin()
            self.model.eval()
            if probes:
                size = optimizer.probe(self.step, self.model, self.loader)
                assert size == optimizer.current_batch_size
                self.loader.batch_sampler.batch_size = size  # type: ignore[union-attr]
            assert not self.model.training
            self.model.train()
            for epoch in range(epochs):
                for batch in self.loader:
                    adam.zero_grad()
                    self.step(batch)
                    adam.step()
                with torch.no_grad():
                    optimizer.on_evaluate(float(epoch))


@pytest.mark.parametrize(
    "options", [{}, {"has_batch_norm": False}, {"num_workers": 1}], ids=["BatchNorm", "LayerNorm", "worker"]
)
def test_plain_loop_is_bit_equal_with_and_without_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    seen = []
    for probes in (False, True):
        folder = tmp_path / str(probes)
        folder.mkdir()
        with generous(monkeypatch) as sent:
            loop = Loop(folder, **options)
            loop.train(probes=probes)
        assert len(sent) == probes
        assert all((found.critical_batch_size is not None) == ("has_batch_norm" in options) for found in sent)
        seen.append((loop.model.losses, rest(loop.model, loop.data)))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == seen[1][1]


@pytest.mark.parametrize("is_away", [False, True], ids=["stored", "server away"])
def test_first_run_of_plain_loop_takes_predicted_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_away: bool
) -> None:
    favour_large_batches(monkeypatch)
    if is_away:
        monkeypatch.setattr(LocalServer, "store_probe", unreachable)
    loop = Loop(tmp_path)
    loop.job = predicting(first_run="predicted", target_metric=0.0, job_id=None)
    with generous(monkeypatch) as sent:
        loop.train(probes=True, epochs=1)
    size, number = (OWN_SIZE, 1) if is_away else (max(SIZES), 2)
    assert set(loop.model.sizes) == {size}
    with client_from_environment(loop.url) as client:
        (job,) = client.list_jobs().jobs
        trials = client.show_job(job.job_id).trials
    states = [TrialState.WITHDRAWN, TrialState.COMPLETED][-number:]
    assert [each.state for each in trials] == states
    # Each window takes a second: two of the withdrawn trial, the epoch, and that of the calibrated probe.
    assert (trials[-1].batch_size, trials[-1].time_s) == (size, 2.0 if is_away else 3.0)
    assert len(sent) == 2


def test_only_the_first_reported_run_of_a_job_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with generous(monkeypatch) as sent:
        with pytest.raises(RuntimeError, match="before its first epoch"):
            crash(Loop(tmp_path))
        Loop(tmp_path).train(probes=True)
        assert len(sent) == 1
        Loop(tmp_path).train(probes=True)
    assert len(sent) == 1


def crash(loop: Loop) -> None:
    with BatchSizeOptimizer(seconds_and_joules(1.0, 10.0), loop.url, loop.job) as optimizer:
        optimizer.get_batch_size()
        raise RuntimeError("before its first epoch")


def test_line_on_the_probe_of_a_plain_loop_begins_like_that_of_a_callback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="zeus_plugins")
    with generous(monkeypatch):
        Loop(tmp_path).train(probes=True, epochs=1)
    assert any(line.startswith("zeus: probed ") for line in caplog.messages)


def test_run_on_a_zeus_server_is_not_probed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="zeus_plugins")
    server = ContractDouble()
    optimizer = BatchSizeOptimizer(monitor_of((1.0, 50.0)), None, JOB, client=server.client())
    optimizer.get_batch_size()
    optimizer.on_train_begin()
    trainer = Trainer(batch_size=64)
    optimizer.probe(trainer.step, trainer.module, trainer.loader)
    optimizer.close()
    assert "probed" not in caplog.text
    assert {path for _, path, _ in server.requests} <= {"/jobs", "/jobs/batch_size", "/trials"}


def test_probe_is_sent_in_a_single_put_request() -> None:
    requests: list[httpx.Request] = []

    class Server(ContractDouble):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            requests.append(request)
            return httpx.Response(200, json=None)

    found = Probe(gpus=GPUS, sizes=(ProbedSize(batch_size=32, time_s=1.0, energy_j=2.0, error=0.1),))
    Server().client().store_probe(TrialId(**TRIAL), found)
    (sent,) = requests
    assert (sent.method, sent.url.path) == ("PUT", "/trials/probe")
    assert TrialProbe.model_validate_json(sent.content) == TrialProbe(**TRIAL, **found.model_dump())


@pytest.mark.parametrize("status", [200, 404, 503])
def test_probe_is_sent_once_and_never_ends_a_training(status: int) -> None:
    requests: list[str] = []

    class Server(Flaky):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.method == "PUT":
                requests.append(request.url.path)
                return httpx.Response(status, json=None if status == 200 else {"message": "as the test asked"})
            return super().__call__(request)

    session = training(Server())
    powers: list[float] = []

    def result(gpus: GpuConfig, power_w: float) -> Probe:
        powers.append(power_w)
        return Probe(gpus=gpus)

    session.send_probe(result)
    session.end()
    assert requests == ["/trials/probe"]
    assert powers == [10.0]
