"""Logic shared by all batch-size callbacks, with a trainer without a framework and an in-memory server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from tests.support.contract_double import CONVERGED, COST_BOUND, KEEP_TRAINING, ContractDouble
from tests.support.fake_trainer import FakeTrainer, active, failing, on_each_rank, trial_of
from tests.support.replay import ReplayMonitor
from zeus_plugins.energy import Measurement
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSOTokenError, ZeusBSOTrainFailError
from zeus_plugins.protocol import GpuConfig, JobSpec, PowerLimitChoice
from zeus_plugins.training import port
from zeus_plugins.training.arguments import TrialOptions
from zeus_plugins.training.batches import BatchSplit
from zeus_plugins.training.defaults import JobWish
from zeus_plugins.training.run import TrialRun
from zeus_plugins.training.trial import TrialInfo

JOB = JobSpec(
    job_id="mnist-1", job_id_prefix="mnist", batch_sizes=(32, 64), default_batch_size=32, max_epochs=3, beta_knob=None
)
GPUS = GpuConfig(max_power=100.0, number_of_gpus=1, gpu_model="A40")
TRIAL = {"job_id": "mnist-1", "batch_size": 64, "trial_number": 7}
# A trial on a Zeus server before its first report.
STATE: dict[str, Any] = {
    "trial": {**TRIAL, "time_s": 3.0, "energy_j": 30.0, "energy_source": "replayed", "epoch": 1.0, "metric": 0.5},
    "has_fractions": None,
    "job": JOB.model_dump(mode="json"),
}
OVER = STATE | {"trial": STATE["trial"] | {"verdict": COST_BOUND}}
MALFORMED = {"trial": {"job_id": "mnist-1"}}
AGAIN = (
    'launch the training again to try the next batch size, or set on_failure="finish" to end each launch with a model'
)
UNEVALUATED = f"ended before the first evaluation; {AGAIN}"


def ten_joules_a_second() -> ReplayMonitor:
    return ReplayMonitor([Measurement(1.0, 10.0, "replayed")] * 20, GPUS)


def run_of(server: ContractDouble, job: JobSpec = JOB, **options: Any) -> TrialRun:
    given = {"energy_monitor": ten_joules_a_second()} | options
    return TrialRun(JobWish(job=job), TrialOptions(**given), connect=lambda *_: server.client())


def begun(server: ContractDouble, port: FakeTrainer | None = None, **options: Any) -> TrialRun:
    run = run_of(server, **options)
    run.begin(port or FakeTrainer())
    active(run).start()
    return run


def reports(server: ContractDouble) -> list[tuple[float, float, float, float]]:
    """Return metric, epoch, seconds and joules of each report."""
    sent = server.sent("POST", "/report")
    return [(body["metric"], body["current_epoch"], body["time"], body["energy"]) for body in sent]


def ends(server: ContractDouble) -> list[tuple[str, str | None]]:
    return [(body["outcome"], body["detail"]) for body in server.sent("PATCH", "/trials")]


# Options


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"after_target": "on"}, "after_target is 'on': choose 'stop' or 'continue'"),
        ({"on_failure": "ignore"}, "on_failure is 'ignore': choose 'raise', 'stop' or 'finish'"),
        ({"max_per_device_batch_size": 0}, "max_per_device_batch_size is 0: give a whole number above 0"),
        (
            {"lr_scaling": "cubic"},
            "unknown learning rate scaling 'cubic': choose one of 'none', 'linear', 'sqrt', 'auto'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_options_are_refused(option: dict[str, Any], problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError) as raised:
        TrialOptions(**option)
    assert str(raised.value) == problem


# Beginning


@pytest.mark.parametrize(
    ("devices", "accumulation", "largest", "split"),
    [
        (4, 1, None, BatchSplit(16, 1)),
        (1, 2, None, BatchSplit(32, 2)),
        (1, 1, 20, BatchSplit(16, 4)),
        (1, 2, 8, BatchSplit(8, 8)),
    ],
)
def test_size_is_divided_by_devices_accumulation_and_the_largest_batch(
    devices: int, accumulation: int, largest: int | None, split: BatchSplit
) -> None:
    port = FakeTrainer(devices=devices)
    port.accumulation = accumulation
    run = run_of(ContractDouble(), max_per_device_batch_size=largest)
    run.begin(port)
    assert port.splits == [split]
    assert trial_of(run).batch_size == 64
    assert active(run).is_reporting


@pytest.mark.parametrize("world_size", [1, 2])
def test_indivisible_sizes_are_refused_before_a_trial(world_size: int) -> None:
    server = ContractDouble()

    def train(port: FakeTrainer) -> None:
        port.devices = 3
        run_of(server, JOB.model_copy(update={"batch_sizes": (30, 32, 64), "default_batch_size": 30})).begin(port)

    for error in on_each_rank(world_size, train):
        assert isinstance(error, ZeusBSOConfigError)
        assert str(error) == (
            "the batch sizes [32, 64] cannot be spread evenly over 3 devices × 1 accumulated batches: batch sizes are "
            "global, samples per optimizer step over all devices; choose multiples of 3"
        )
    assert server.requests == []


def test_trainer_without_accumulation_is_refused_before_a_trial() -> None:
    server, port = ContractDouble(), FakeTrainer()
    port.no_accumulation = "this trainer accumulates nothing"
    run_of(server, max_per_device_batch_size=64).begin(port)
    server.requests.clear()
    with pytest.raises(ZeusBSOConfigError, match=r"accumulates nothing, so sizes above max_per_device_batch_size=32 ×"):
        run_of(server, max_per_device_batch_size=32).begin(port)
    assert server.requests == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_size_outside_the_job_is_refused_on_all_ranks_and_ends_the_trial(world_size: int) -> None:
    server = ContractDouble(batch_size=48)

    def train(port: FakeTrainer) -> None:
        run = run_of(server)
        try:
            run.begin(port)
        except ZeusBSOError as error:
            run.finish(error)
            assert port.splits == []
            raise

    said = "the server chose batch size 48, which is not one of the job's: [32, 64]"
    assert [str(error) for error in on_each_rank(world_size, train)] == [said] * world_size
    assert ends(server) == [("withdrawn", f"ZeusBSOConfigError: {said}")]


class Refusing(ContractDouble):
    """Accept no token."""

    def __call__(self, request: httpx.Request) -> httpx.Response:  # noqa: ARG002 - any request
        return httpx.Response(401, json={"message": "as the test asked"})


@pytest.mark.parametrize("world_size", [1, 2])
def test_error_of_the_server_reaches_all_ranks(world_size: int) -> None:
    server = Refusing()

    def train(port: FakeTrainer) -> None:
        run = run_of(server)
        try:
            run.begin(port)
        finally:
            run.finish()
            assert (run.trial, run.active) == (None, None)

    assert [type(error) for error in on_each_rank(world_size, train)] == [ZeusBSOTokenError] * world_size


def test_offline_ranks_all_train_at_the_default_size() -> None:
    server = ContractDouble()
    server.down = True

    def train(port: FakeTrainer) -> Any:
        run = begun(server, port)
        active(run).report_evaluation(lambda: 0.5, 3.0)
        run.finish()
        trial = trial_of(run)
        return trial.batch_size, trial.trial_number, port.is_stopped, port.logged[0]["zeus/trial_number"]

    assert on_each_rank(2, train) == [(32, None, True, 0.0)] * 2


# Learning rate, start


@pytest.mark.parametrize(("scaling", "rate"), [("none", 0.1), ("linear", 0.2), ("sqrt", 0.1 * 2**0.5)])
@pytest.mark.parametrize("keeps_optimizers", [True, False])
def test_rates_are_scaled_and_restored_in_reused_optimizers(scaling: str, rate: float, keeps_optimizers: bool) -> None:
    port = FakeTrainer()
    port.keeps_optimizers = keeps_optimizers
    run = run_of(ContractDouble(), lr_scaling=scaling)
    run.begin(port)
    active(run).scale_learning_rate()
    assert port.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert port.scheduler.base_lrs == pytest.approx([rate])
    run.finish()
    assert port.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 if keeps_optimizers else rate)
    assert port.scheduler.base_lrs == pytest.approx([0.1 if keeps_optimizers else rate])


def test_rank_0_alone_asks_and_measures_and_all_ranks_log_the_choice() -> None:
    server = ContractDouble(KEEP_TRAINING)

    def train(port: FakeTrainer) -> Any:
        run = begun(server, port, lr_scaling="linear")
        active(run).report_evaluation(lambda: 0.25, 1.0)
        run.finish()
        assert port.splits == [BatchSplit(32, 1)]
        return port.logged

    logged = [{"zeus/batch_size": 64.0, "zeus/trial_number": 7.0, "zeus/lr_factor": 2.0}]
    assert on_each_rank(2, train) == [[*logged, {"zeus/epoch_bound": 3.0, "zeus/cost_j": 55.0}]] * 2
    assert len(server.sent("GET", "/jobs/batch_size")) == 1
    assert reports(server) == [(0.25, 1.0, 1.0, 10.0)]


# Delivered sizes


@pytest.mark.parametrize(
    ("delivered", "accumulation", "problem"),
    [
        ([32], 2, r"deliver \[32\] samples per batch instead of 16 \(batch size 64 over 2 devices × 2 accumulated"),
        ([16], 1, r"deliver \[16\] samples per batch instead of 32 \(batch size 64 over 2 devices × 1 accumulated"),
        ([32, 16.5], 1, r"deliver \[32, 16.5\] samples per batch instead of 32 "),
        ([None], 1, r"deliver \[\?\] samples per batch instead of 32 "),
        ([21], 3, r"deliver \[21\] samples per batch instead of 10.6667 "),
    ],
    ids=["accumulation", "loader", "one of two loaders", "unknown", "uneven"],
)
def test_wrong_delivered_size_is_an_error(
    monkeypatch: pytest.MonkeyPatch, delivered: list[float | None], accumulation: int, problem: str
) -> None:
    port = FakeTrainer(devices=2)
    run = begun(ContractDouble(), port)
    active(run).check()
    port.accumulation = accumulation
    monkeypatch.setattr(port, "delivered", lambda: delivered)
    with pytest.raises(ZeusBSOConfigError, match=problem):
        active(run).check()


# Reports


@pytest.mark.parametrize("world_size", [1, 2])
def test_verdict_stops_all_ranks_and_ends_the_reports(world_size: int) -> None:
    server = ContractDouble(KEEP_TRAINING, CONVERGED)

    def train(port: FakeTrainer) -> Any:
        run = begun(server, port)
        active(run).report_evaluation(lambda: 0.25, 1.0)
        stops = [port.is_stopped]
        active(run).report_evaluation(lambda: 0.75, 2.0)
        stops.append(port.is_stopped)
        active(run).report_evaluation(lambda: 0.8, 3.0)
        active(run).report_last_epoch(3.0)
        run.finish()
        run.raise_failure()
        return stops, trial_of(run).metric

    assert on_each_rank(world_size, train) == [([False, True], 0.75)] * world_size
    assert reports(server) == [(0.25, 1.0, 1.0, 10.0), (0.75, 2.0, 2.0, 20.0)]
    assert ends(server) == []


def test_metric_of_none_is_not_reported() -> None:
    server = ContractDouble()
    run = begun(server)
    active(run).report_evaluation(lambda: None, 1.0)
    assert reports(server) == []
    assert active(run).is_reporting


@pytest.mark.parametrize("world_size", [1, 2])
def test_missing_metric_raises_on_all_ranks(world_size: int) -> None:
    server = ContractDouble()

    def train(port: FakeTrainer) -> None:
        run = begun(server, port)
        try:
            # Only rank 0 is asked for the metric.
            active(run).report_evaluation(failing(KeyError("f1")) if port.rank == 0 else failing(AssertionError()), 1.0)
        except KeyError as error:
            run.finish(error)
            raise

    assert [str(error) for error in on_each_rank(world_size, train)] == ["'f1'"] * world_size
    assert set(ends(server)) == {("failed", "KeyError: 'f1'")}


@pytest.mark.parametrize(
    ("evaluated", "ended", "sent"),
    [
        ([2.0], 3.0, [2.0, 3.0]),
        ([2.75], 3.0, [2.75, 3.0]),
        ([2.0], 2.0, [2.0]),  # interrupted: the trial may be repeated
        ([3.0], 3.0, [3.0]),
        ([], 2.0, []),  # interrupted before the first metric
    ],
)
def test_last_epoch_is_reported_without_an_evaluation(evaluated: list[float], ended: float, sent: list[float]) -> None:
    server = ContractDouble(*[KEEP_TRAINING] * 2)
    run = begun(server)
    for epochs in evaluated:
        active(run).report_evaluation(lambda: 0.5, epochs)
    active(run).report_last_epoch(ended)
    assert [(metric, epoch) for metric, epoch, _, _ in reports(server)] == [(0.5, epoch) for epoch in sent]


def test_training_without_an_evaluation_ends_with_an_error() -> None:
    run = begun(ContractDouble())
    with pytest.raises(ZeusBSOConfigError, match=r"ended after 3 epochs at batch size .* without an evaluation"):
        active(run).report_last_epoch(3.0)


# Several machines


def test_ranks_synchronize_before_the_start_and_each_report() -> None:
    server = ContractDouble(KEEP_TRAINING, CONVERGED)

    def train(port: FakeTrainer) -> Any:
        port.machine = f"node {port.rank}"
        measured = Measurement(1.0, 10.0 if port.rank == 0 else 5.0, f"node {port.rank}")
        run = begun(server, port, energy_monitor=ReplayMonitor([measured] * 9, GPUS))
        active(run).report_evaluation(lambda: 0.25, 1.0)
        active(run).report_evaluation(lambda: 0.75, 2.0)
        run.finish()
        return trial_of(run).energy_j

    assert on_each_rank(2, train) == [30.0, 30.0]
    assert reports(server) == [(0.25, 1.0, 1.0, 15.0), (0.75, 2.0, 2.0, 30.0)]
    (registration,) = server.sent("POST", "/jobs")
    assert (registration["max_power"], registration["number_of_gpus"]) == (200.0, 2)


# Ends


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, ("failed", None)),
        (ValueError("no such label"), ("failed", "ValueError: no such label")),
        (MemoryError("64 GiB"), ("infeasible", "MemoryError: 64 GiB")),
        (KeyboardInterrupt(), ("suspended", "KeyboardInterrupt: ")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_end_of_the_training_ends_the_trial_once(error: BaseException | None, end: tuple[str, str | None]) -> None:
    server, port = ContractDouble(), FakeTrainer()
    run = begun(server, port)
    run.finish(error)
    run.finish(RuntimeError("a second time"))
    assert ends(server) == [end]
    assert (port.loader.batch_size, port.accumulation) == (16, 1)
    assert run.active is None
    assert (trial_of(run).time_s, trial_of(run).energy_j) == (1.0, 10.0)


def test_failed_cleanup_does_not_prevent_the_end_of_the_trial(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ContractDouble()
    run = begun(server)
    monkeypatch.setattr(run.patches, "undo", failing(RuntimeError("it stays")))
    run.finish()
    assert ends(server) == [("failed", None)]
    assert "could not clean up after the training" in caplog.text


def test_out_of_memory_on_a_further_rank_is_reported_by_the_same_rank() -> None:
    server = ContractDouble()

    def train(port: FakeTrainer) -> None:
        run = begun(server, port)
        if port.rank == 1:
            run.finish(MemoryError("64 GiB"))
            port.broadcast(None)
        else:
            port.broadcast(None)
            assert ends(server) == [("infeasible", "MemoryError: 64 GiB")]
            run.finish(RuntimeError("Connection closed by peer"))

    assert on_each_rank(2, train) == [None, None]


@pytest.mark.parametrize(
    ("verdicts", "on_failure", "said"),
    [
        ([COST_BOUND], "raise", f"cost bound crossed; {AGAIN}"),
        ([KEEP_TRAINING], "raise", f"ended before the metric reached 0.5 (it was 0.25); {AGAIN}"),
        ([], "raise", UNEVALUATED),
        ([CONVERGED], "raise", "None"),
        ([COST_BOUND], "stop", "None"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_failed_trial_raises_on_all_ranks(
    world_size: int, verdicts: list[dict[str, Any]], on_failure: str, said: str
) -> None:
    server = ContractDouble(*verdicts)

    def train(port: FakeTrainer) -> None:
        run = begun(server, port, on_failure=on_failure)
        for _ in verdicts:
            active(run).report_evaluation(lambda: 0.25, 1.0)
        run.finish()
        run.raise_failure()

    ended = on_each_rank(world_size, train)
    assert [str(error) for error in ended] == [said] * world_size
    assert {type(error) for error in ended} == {type(None) if said == "None" else ZeusBSOTrainFailError}


# Checkpoints


def test_state_is_plain_and_counts_the_open_window() -> None:
    run = begun(ContractDouble(KEEP_TRAINING))
    assert run_of(ContractDouble()).state() == {}
    active(run).report_evaluation(lambda: 0.5, 0.5)
    state = run.state()
    assert state["has_fractions"] is True
    trial = state["trial"]
    assert {name: trial[name] for name in TRIAL} == TRIAL
    assert (trial["time_s"], trial["energy_j"], trial["epoch"], trial["metric"]) == (2.0, 20.0, 0.5, 0.5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_trial_of_a_checkpoint_continues_on_all_ranks(world_size: int) -> None:
    server = ContractDouble(CONVERGED)

    def train(port: FakeTrainer) -> Any:
        run = run_of(server)
        # Only the state of rank 0 counts.
        run.resume(port, lambda: STATE if port.rank == 0 else None)
        assert active(run).is_reporting
        active(run).start()
        active(run).report_evaluation(lambda: 0.75, 2.0)
        run.finish()
        return port.splits

    assert on_each_rank(world_size, train) == [[BatchSplit(64 // world_size, 1)]] * world_size
    assert reports(server) == [(0.75, 2.0, 4.0, 40.0)]
    assert server.sent("GET", "/jobs/batch_size") == []


def missed(server: ContractDouble, port: FakeTrainer) -> TrialRun:
    """Return a run at 64, not the job's default, that the server has stopped without the target."""
    run = begun(server, port, on_failure="finish")
    active(run).report_evaluation(lambda: 0.5, 1)
    return run


def test_trainer_without_a_second_fit_ends_a_missed_run() -> None:
    server, port = ContractDouble(COST_BOUND), FakeTrainer()
    port.no_continuation = "FSDPStrategy sets up its model once"
    run = missed(server, port)
    assert run.finished_by(port) is None
    assert "not finished at another batch size: FSDPStrategy sets up its model once" in port.said[-1]
    run.finish()
    run.raise_failure()  # "finish" never calls this


def test_zeus_server_ends_a_missed_run(caplog: pytest.LogCaptureFixture) -> None:
    server, port = ContractDouble(COST_BOUND), FakeTrainer()
    run = missed(server, port)
    assert run.finished_by(port) is None
    assert "the run is not finished at batch size 32: " in caplog.text
    assert run.active is None
    assert trial_of(run).verdict is not None
    run.raise_failure()


def test_run_at_the_target_needs_no_finishing() -> None:
    server, port = ContractDouble(CONVERGED), FakeTrainer()
    run = missed(server, port)
    assert run.finished_by(port) is None
    assert run.active is not None
    run.finish()


@pytest.mark.parametrize(("has_fractions", "reported"), [(True, 1.5), (False, 2.0), (None, 1.5)])
def test_resumed_trial_continues_in_fractions_or_whole_epochs(has_fractions: bool | None, reported: float) -> None:
    server = ContractDouble(KEEP_TRAINING)
    run = run_of(server)
    run.resume(FakeTrainer(), lambda: STATE | {"has_fractions": has_fractions})
    active(run).start()
    active(run).report_evaluation(lambda: 0.5, 1.5)
    assert reports(server)[0][1] == reported


def test_checkpoint_with_only_a_trial_continues_with_the_job_of_this_training() -> None:
    wish, server = JobWish(monitor="val_acc", target=0.9, job_id="mnist-1"), ContractDouble()
    run = TrialRun(wish, TrialOptions(energy_monitor=ten_joules_a_second()), connect=lambda *_: server.client())
    run.resume(FakeTrainer(), lambda: {"trial": STATE["trial"]})
    assert active(run).is_reporting
    state = run.state()
    assert (state["trial"]["trial_number"], state["has_fractions"], state["job"]["job_id"]) == (7, None, "mnist-1")


def test_resumed_size_removed_from_the_job_continues() -> None:
    port = FakeTrainer()
    run = run_of(ContractDouble(), JOB.model_copy(update={"batch_sizes": (32,)}))
    run.resume(port, lambda: STATE)
    assert port.splits == [BatchSplit(64, 1)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("saved", [None, {}])
def test_checkpoint_without_a_trial_leaves_the_training_unchanged(
    saved: dict[str, Any] | None, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = ContractDouble()

    def train(port: FakeTrainer) -> Any:
        run = run_of(server, lr_scaling="linear")
        run.resume(port, lambda: saved)
        states = (run.trial, run.active, run.state(), run.lr_factor)
        run.finish(RuntimeError())
        run.raise_failure()
        return states, port.splits, port.logged, port.optimizer.param_groups[0]["lr"]

    assert on_each_rank(world_size, train) == [((None, None, {}, 1.0), [], [], 0.1)] * world_size
    assert server.requests == []
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == (
        "the checkpoint holds no trial, so this training continues at its own batch size, unmeasured and "
        "unreported: the rest of a training says nothing about a whole training. Train from the start to let the "
        "server choose"
    )


def test_ended_trial_trains_on_at_the_same_size_without_reports() -> None:
    server, port = ContractDouble(), FakeTrainer()
    run = run_of(server)
    run.resume(port, lambda: OVER)
    assert not active(run).is_reporting
    active(run).start()
    active(run).check()
    active(run).report_evaluation(failing(AssertionError()), 2.0)
    run.finish(RuntimeError("a crash"))
    run.raise_failure()
    assert port.splits == [BatchSplit(64, 1)]
    assert len(port.logged) == 1
    assert server.requests == []


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        (lambda: STATE, r"the batch sizes \[64\] cannot be spread evenly over 3 devices"),
        (lambda: MALFORMED, "the checkpoint holds no trial that can be continued"),
        (lambda: {"another": "state"}, "the checkpoint holds no trial that can be continued"),
        (failing(ZeusBSOConfigError("no such file")), "no such file"),
    ],
    ids=["devices", "malformed", "foreign", "unreadable"],
)
def test_unusable_checkpoint_raises_on_all_ranks_and_leaves_the_trial(
    saved: Callable[[], Any], problem: str, world_size: int
) -> None:
    server = ContractDouble()

    def train(port: FakeTrainer) -> None:
        port.devices = 3
        run = run_of(server)
        try:
            run.resume(port, saved if port.rank == 0 else failing(AssertionError()))
        except ZeusBSOConfigError as error:
            run.finish(error)
            with pytest.raises(ZeusBSOConfigError, match=problem):
                raise

    assert on_each_rank(world_size, train) == [None] * world_size
    assert server.requests == []


# Power limits


def test_power_limit_is_kept_while_the_trial_is_open() -> None:
    choice = PowerLimitChoice(power_limit_w=100.0, power_limits=4)
    run = begun(ContractDouble())
    active(run).keep_power_limits(choice, has_measured=True)
    # The checkpoint of an earlier version contains measurements, too.
    state = run.state()["trial"] | {"power_profile": {"samples": []}}
    assert TrialInfo.restored(state).power_limit_w == 100.0
    over = run_of(ContractDouble())
    over.resume(FakeTrainer(), lambda: OVER)
    active(over).keep_power_limits(choice, has_measured=True)
    assert over.state()["trial"]["power_limit_w"] is None


@pytest.fixture(name="_store")
def share_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch does not list it
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)


@pytest.mark.usefixtures("_store")
def test_rank_after_the_deadline_does_not_continue_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "AGREEMENT_S", 0.1)
    has_given_up = threading.Event()

    def ask(trainer: FakeTrainer) -> bool:
        if trainer.rank == 1:
            has_given_up.wait(60.0)
        is_agreed = port.all_agree(trainer, "trial 3", True)
        has_given_up.set()
        return is_agreed

    assert on_each_rank(2, ask) == [False, False]


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize("is_able", [True, False])
def test_ranks_agree_if_all_are_able(is_able: bool) -> None:
    def ask(trainer: FakeTrainer) -> bool:
        return port.all_agree(trainer, "trial 3", is_able or trainer.rank == 0)

    assert on_each_rank(2, ask) == [is_able] * 2
