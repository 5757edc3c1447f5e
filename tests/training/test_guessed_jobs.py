"""Recurrences of a job described by few arguments, with an embedded server and a trainer without a framework."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_trainer import FakeTrainer, active, failing, on_each_rank, trial_of
from tests.support.replay import ReplayMonitor
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.local import LocalServer
from zeus_plugins.client.outbox import default_outbox
from zeus_plugins.client.port import ServerPort
from zeus_plugins.energy import Measurement
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOServerUnreachableError
from zeus_plugins.protocol import Fingerprint, GpuConfig, JobSpec, Origin
from zeus_plugins.training.arguments import TrialOptions
from zeus_plugins.training.defaults import JobWish, TrainingFacts
from zeus_plugins.training.run import TrialRun

GPUS = GpuConfig(max_power=100.0, number_of_gpus=1, gpu_model="A40")
JOB_ID = "train-Net-val_acc-0.9-1xA40"
ADAM = type("Adam", (), {"param_groups": [], "defaults": {}})()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"embedded://{tmp_path / 'bso.sqlite3'}"


@pytest.fixture
def server(url: str) -> Iterator[ServerPort]:
    with client_from_environment(url) as client:
        yield client


class Net(FakeTrainer):
    def __init__(self, **told: Any) -> None:
        super().__init__()
        self.model, self.optimizer_name = told.pop("model", "Net"), told.pop("optimizer", None)
        self.told = TrainingFacts(**{**vars(self.told), "max_epochs": 3, "model": self.model, **told})

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(model=self.model, framework="none", optimizer=self.optimizer_name)


def run_of(url: str, wish: JobWish | None = None, **options: Any) -> TrialRun:
    monitor = ReplayMonitor(repeat(Measurement(1.0, 10.0, "replayed")), GPUS)
    wish = wish or JobWish(monitor="val_acc", target=0.9)
    return TrialRun(wish, TrialOptions(server_url=url, energy_monitor=monitor, **options))


def launched(url: str, port: FakeTrainer, *metrics: float, target: float | None = 0.9, **said: Any) -> TrialRun:
    """Run a training that reports these metrics."""
    run = run_of(url, JobWish(target=target, **{"monitor": "val_acc", **said}), on_failure="stop")
    try:
        run.begin(port)
        active(run).start()
        for epoch, metric in enumerate(metrics, 1):
            active(run).report_evaluation(partial(float, metric), float(epoch))
    except BaseException as error:
        run.finish(error)
        raise
    run.finish()
    return run


def test_launch_uses_the_registration_despite_different_guesses(url: str, server: ServerPort) -> None:
    launched(url, Net(), 0.95)
    registered = server.show_job(JOB_ID).job
    assert (registered.batch_sizes, registered.max_epochs) == ((8, 16, 32, 64, 128, 256, 512), 3)
    for told in ({"step_size": 100}, {"script": "moved", "samples": 1050}):
        port = Net(**told)
        run = launched(url, port, 0.95, job_id=JOB_ID)
        assert trial_of(run).batch_size in registered.batch_sizes
        assert ("(the script has 100: `bso-server jobs revise` takes --default 100)" in port.said[0]) == (
            "step_size" in told
        )
    view = server.show_job(JOB_ID)
    assert (view.job, view.trial_count) == (registered, 3)


def test_changed_max_epochs_of_the_trainer_revise_the_job(
    url: str, server: ServerPort, caplog: pytest.LogCaptureFixture
) -> None:
    launched(url, Net(max_epochs=2), 0.1, 0.1)
    caplog.clear()
    run = launched(url, Net(max_epochs=6, step_size=32), 0.1, 0.1, 0.1, 0.1, 0.1, 0.95, job_id=JOB_ID)
    assert (trial_of(run).batch_size, trial_of(run).epoch) == (64, 6)
    assert [each.message for each in caplog.records] == [f"job {JOB_ID} revised: max_epochs 2 -> 6"]
    view = server.show_job(JOB_ID)
    assert (view.job.max_epochs, view.job.batch_sizes[0]) == (6, 8)
    assert [trial.state for trial in view.trials] == ["exhausted", "completed"]


@pytest.mark.parametrize("job_id", ["mine", None])
def test_stated_terms_revise_the_job_and_unstated_terms_follow_the_registration(
    url: str, server: ServerPort, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, job_id: str | None
) -> None:
    monkeypatch.setenv("ZEUS_JOB_ID", "mine")
    fields: dict[str, Any] = {"job_id": job_id, "job_id_prefix": "mine", "target_metric": 0.9, "max_epochs": 3}
    fields |= {"batch_sizes": (32, 64), "default_batch_size": 64}
    launched(url, Net(), 0.95, target=None, job=JobSpec(**fields))
    by_hand = server.show_job("mine").job.model_copy(update={"eta_knob": 0.7, "max_epochs": 9, "revise": True})
    assert server.register(by_hand).eta_knob == 0.7
    caplog.clear()
    launched(url, Net(), 0.95, target=None, job=JobSpec(**{**fields, "batch_sizes": (32, 64, 128)}))
    assert "job mine revised: batch_sizes +128, max_epochs 9 -> 3" in caplog.text
    view = server.show_job("mine")
    assert (view.job.eta_knob, len(view.revisions)) == (0.7, 2)


def test_single_fields_of_a_job_revise_the_job(url: str, server: ServerPort) -> None:
    for fields in (None, {"eta_knob": 0, "controls": "off"}, {"batch_sizes": [32]}):
        launched(url, Net(), 0.1, 0.95, job_id="mine", job=fields)
    view = server.show_job("mine")
    assert (view.job.eta_knob, view.job.controls) == (0, 0)
    assert (view.job.batch_sizes, view.job.default_batch_size, view.trials[-1].batch_size) == ((32,), 32, 32)
    run = launched(url, Net(), 0.95, job_id="mine", job={"batch_sizes": [64]})  # the script's size, not the earlier pin
    assert (trial_of(run).batch_size, server.show_job("mine").job.default_batch_size) == (64, 64)


def test_pin_ends_with_the_first_unpinned_launch(url: str, server: ServerPort) -> None:
    def night(batch_sizes: tuple[int, ...] | None) -> tuple[int, tuple[int, ...]]:
        run = launched(url, Net(), 0.1, 0.95, job_id="mine", batch_sizes=batch_sizes)
        return trial_of(run).batch_size, server.show_job("mine").job.batch_sizes

    own, sizes = night(None)
    assert (own, len(sizes) > 2) == (64, True)
    assert night((32,)) == (32, (32,))
    assert night(None)[1] == sizes
    assert server.show_job("mine").job.default_batch_size == own


def test_changed_gpus_revise_the_job(url: str, server: ServerPort, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(url, Net(), 0.95, job_id="mine")
    monkeypatch.setattr(f"{__name__}.GPUS", GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="H100"))
    launched(url, Net(), 0.95, job_id="mine")
    view = server.show_job("mine")
    assert view.revisions[0].in_words == "max_power 100 -> 300, gpu_model A40 -> H100"
    assert [trial.other_gpus for trial in view.trials] == [True, False]
    # The first run's results do not apply to the new costs.
    assert view.min_cost_j == 0.5 * 10 + 0.5 * 300


def test_late_results_never_revise_the_job(url: str, server: ServerPort, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"job_id": "mine", "job_id_prefix": "mine", "target_metric": 0.9, "max_epochs": 3}
    job = JobSpec(**fields, batch_sizes=(32, 64), default_batch_size=64, eta_knob=0.5)
    launched(url, Net(), 0.95, target=None, job=job)
    with monkeypatch.context() as away:
        away.setattr(LocalServer, "register", failing(ZeusBSOServerUnreachableError("away")))
        away.setattr(LocalServer, "record_offline", failing(ZeusBSOServerUnreachableError("away")))
        launched(url, Net(), 0.95, target=None, job=job)
    revised = server.show_job("mine").job.model_copy(update={"eta_knob": 1.0, "max_epochs": 5, "revise": True})
    server.register(revised)
    launched(url, Net(max_epochs=5), 0.95, job_id="mine")
    view = server.show_job("mine")
    assert (view.job.eta_knob, view.job.max_epochs, len(view.revisions)) == (1.0, 5, 1)
    assert [trial.origin for trial in view.trials][1] is Origin.OFFLINE


def test_offline_training_takes_the_registered_default_size(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(url, Net(), 0.95)
    monkeypatch.setattr(LocalServer, "request_trial", failing(ZeusBSOServerUnreachableError("away")))
    port = Net(step_size=100)
    assert trial_of(launched(url, port, 0.95, job_id=JOB_ID)).batch_size == 64
    # The results are in the outbox, not on the server.
    assert f"zeus: results are kept in {default_outbox().directory}" in port.said


def test_statement_contradicting_the_registration_is_named_in_the_error(url: str, server: ServerPort) -> None:
    launched(url, Net(), 0.95)
    with pytest.raises(ZeusBSOConfigError, match=r"begun with target 0\.9, .* for 0\.8 use another job_id, such as"):
        launched(url, Net(step_size=32), target=0.8, job_id=JOB_ID)
    with pytest.raises(ZeusBSOConfigError, match="configuration: higher_is_better_metric is True, not False"):
        launched(url, Net(step_size=32), mode="min", job_id=JOB_ID)
    assert server.show_job(JOB_ID).trial_count == 1


def test_guessed_direction_yields_to_the_registered_direction(url: str, server: ServerPort) -> None:
    launched(url, Net(), 0.95)
    job = JobSpec(**server.show_job(JOB_ID).job.model_dump(include=set(JobSpec.model_fields)))
    unsaid = JobSpec(**job.model_dump(exclude={"higher_is_better_metric"}))
    port = Net()
    run = launched(url, port, 0.95, job=unsaid, monitor="loss", target=None)
    verdict = trial_of(run).verdict
    assert verdict is not None
    assert verdict.converged


def test_registration_unfit_for_this_training_is_refused_before_a_trial(url: str, server: ServerPort) -> None:
    launched(url, Net(), 0.95)
    port = Net(unit=3, step_size=96)
    port.devices = 3
    with pytest.raises(ZeusBSOConfigError, match="cannot be spread evenly over 3 devices"):
        launched(url, port, job_id=JOB_ID)
    assert server.show_job(JOB_ID).trial_count == 1


def test_checkpoint_keeps_the_guesses(url: str, server: ServerPort) -> None:
    port = Net()
    run = run_of(url)
    run.begin(port)
    active(run).start()
    active(run).report_evaluation(lambda: 0.1, 1.0)
    saved = run.state()
    run.finish(KeyboardInterrupt())
    resumed = run_of(url)
    resumed.resume(Net(step_size=96, max_epochs=2), lambda: saved)
    assert resumed.state()["job"] == saved["job"]
    active(resumed).start()
    active(resumed).report_evaluation(lambda: 0.95, 2.0)
    resumed.finish()
    (trial,) = server.show_job(JOB_ID).trials
    assert (trial.state, trial.time_s) == ("completed", 3.0)  # includes the window that the checkpoint closed


def test_results_of_an_offline_training_follow_the_registration(
    url: str, server: ServerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(url, Net(), 0.95)
    with monkeypatch.context() as away:
        away.setattr(LocalServer, "register", failing(ZeusBSOServerUnreachableError("away")))
        away.setattr(LocalServer, "record_offline", failing(ZeusBSOServerUnreachableError("away")))
        launched(url, Net(step_size=32, max_epochs=9), 0.95, job_id=JOB_ID)
    launched(url, Net(), 0.95)
    view = server.show_job(JOB_ID)
    assert [trial.batch_size for trial in view.trials if trial.origin is Origin.OFFLINE] == [32]
    assert view.trial_count == 3


def test_all_ranks_use_the_job_of_rank_0(url: str, server: ServerPort) -> None:
    def train(port: FakeTrainer) -> tuple[int, int]:
        port.told = TrainingFacts(script="train", model="Net", samples=1000 + port.rank, step_size=64, unit=2)
        run = launched(url, port, 0.95)
        return trial_of(run).batch_size, run.state()["job"]["max_epochs"]

    assert on_each_rank(2, train) == [(64, 100)] * 2
    assert server.show_job(JOB_ID).trial_count == 1


# Daily launches of one training


def test_growing_data_keep_the_job_and_cause_a_single_line_about_the_drift(
    url: str, server: ServerPort, caplog: pytest.LogCaptureFixture
) -> None:
    for samples in (1000, 1090, 910, 1101):
        launched(url, Net(samples=samples), 0.5, 0.95)
    view = server.show_job(JOB_ID)
    assert view.trial_count == 4
    assert view.job.fingerprint is not None
    assert view.job.fingerprint.samples == 1000
    (line,) = caplog.messages
    assert line.startswith(f"the training data have 1,101 samples, 1,000 when job {JOB_ID} began: ")


# Fingerprint of a training


def test_job_with_a_different_fingerprint_is_a_warning(
    url: str, server: ServerPort, caplog: pytest.LogCaptureFixture
) -> None:
    launched(url, Net(optimizer="SGD"), 0.95, job_id="mine")
    launched(url, Net(optimizer="SGD"), 0.95, job_id="mine")
    assert [record for record in caplog.records if "something else" in record.message] == []
    launched(url, Net(model="Big", optimizer="Adam"), 0.95, job_id="mine")
    (warning,) = [record for record in caplog.records if "something else" in record.message]
    assert warning.levelno == logging.WARNING
    assert "(model Net before, Big now; optimizer SGD before, Adam now)" in warning.message
    assert "job_id='mine-Big'" in warning.message
    assert server.show_job("mine").trial_count == 3


def test_optimizer_created_later_is_added_to_the_fingerprint_later(
    url: str, server: ServerPort, caplog: pytest.LogCaptureFixture
) -> None:
    launched(url, Net(), 0.95)
    fingerprint = Fingerprint(
        model="Net", framework="none", optimizer="SimpleNamespace", monitor="val_acc", samples=1000
    )
    assert server.show_job(JOB_ID).job.fingerprint == fingerprint
    port = Net()
    port.optimizer = ADAM
    launched(url, port, 0.95)
    assert "(optimizer SimpleNamespace before, Adam now)" in caplog.text


# Lines for the user


def test_training_prints_lines_at_the_begin_and_the_end(url: str) -> None:
    first, second, third = Net(), Net(), Net()
    launched(url, first, 0.5, 0.95)
    launched(url, second, 0.95)
    launched(url, third, 0.1, 0.1, 0.1)
    place = url.removeprefix("embedded://")
    guesses = "batch sizes 8, 16, 32, 64, 128, 256, 512; at most 3 epochs; higher val_acc is better; the job's id"
    assert first.said == [
        f"zeus: batch size 64, your own: first run of job {JOB_ID} (trial 1)",
        f"zeus: guessed: {guesses} (job=JobSpec(…) sets them)",
        f"zeus: results are kept in {place}",
        "zeus: target reached after 2 epochs: val_acc 0.95, target 0.9. Batch size 64 took 2 s and 20 J (replayed), "
        "a cost of 110 J",
        "zeus: Your default, 64, is the best batch size so far. Tried so far: 1 of 7 batch sizes.",
    ]
    begin, end, next_steps = second.said
    assert begin.startswith("zeus: batch size 128 in place of your 64: a trial with about ")
    assert begin.endswith(f"(job {JOB_ID}, trial 2)")
    assert "[" not in begin
    assert end.endswith("Batch size 128 took 1 s and 10 J (replayed), a cost of 55 J")
    assert next_steps == (
        "zeus: Whether 128 saves against your default, 64, is not shown yet. 1 of at least 2 runs at 64 so far. "
        "Tried so far: 2 of 7 batch sizes."
    )
    _, end, next_steps = third.said
    assert re.match(r"zeus: stopped after \d epochs?.*: val_acc 0\.1, target 0\.9", end)
    assert next_steps == "zeus: Launch the training again to try the next batch size."


def test_final_line_of_a_target_setting_run_states_the_whole_cost(url: str) -> None:
    ports = [Net(), Net(), Net()]
    for port in ports:
        launched(url, port, 0.1, 0.95, 0.5, target=None)
    for port in ports:
        assert port.said[-2].endswith(". Batch size 64 took 3 s and 30 J (replayed), a cost of 165 J")
    # From then on, the third run counts as ended after two epochs.
    assert "Target 0.95, learned from runs 1 to 3" in ports[2].said[-1]


def test_final_line_names_the_best_size_once(url: str) -> None:
    port, only = (
        Net(),
        JobSpec(
            job_id="only",
            job_id_prefix="only",
            batch_sizes=(64,),
            default_batch_size=64,
            target_metric=0.9,
            max_epochs=9,
        ),
    )
    launched(url, port, 0.5, 0.95, target=None, job=only)
    assert port.said[-1] == "zeus: Your default, 64, is the best batch size so far. All batch sizes are tried."


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("a fault"), "it counts as failed, and its batch size is tried"),
        (MemoryError(), "its batch size and larger ones are left out from now"),
        (KeyboardInterrupt(), "it continues if the training resumes"),
        (ZeusBSOConfigError("no such metric"), "it counts against no batch size."),
    ],
)
def test_error_is_reported_with_the_consequence_for_the_trial(url: str, error: BaseException, outcome: str) -> None:
    port = Net()
    run = run_of(url)
    run.begin(port)
    run.finish(error)
    ended = f"zeus: trial 1 of job {JOB_ID} was ended by {type(error).__name__} after 0 s and 0 J"
    assert port.said[-1].startswith(f"{ended}: {outcome}")


def test_crash_names_the_next_size_and_a_second_crash_the_exclusion(url: str) -> None:
    two = JobSpec(
        job_id="two", job_id_prefix="two", batch_sizes=(64, 128), default_batch_size=64, target_metric=0.9, max_epochs=9
    )
    lines = []
    for _ in range(2):
        launched(url, Net(), 0.5, 0.95, target=None, job=two)
        port = Net()
        run = run_of(url, JobWish(monitor="val_acc", job=two))
        run.begin(port)
        assert trial_of(run).batch_size == 128
        run.finish(ValueError("no batch"))
        lines.append(port.said[1].rpartition("J: ")[2])
    then = "and the next launch takes a size that has reached the target (64 is the best so far)."
    assert lines == [f"it counts as failed, {then}", f"batch size 128 is not tried again, {then}"]


def test_trackers_get_hyperparameters_and_costs(url: str) -> None:
    port = Net()
    launched(url, port, 0.5, 0.95)
    assert port.hyperparameters == {
        "zeus/job_id": JOB_ID,
        "zeus/batch_size": 64,
        "zeus/policy": "gp_voi",
        "zeus/reason": f"first run of job {JOB_ID}",
    }
    assert port.logged == [
        {"zeus/batch_size": 64.0, "zeus/trial_number": 1.0, "zeus/lr_factor": 1.0},
        {"zeus/epoch_bound": 3.0, "zeus/cost_j": 55.0},
        {"zeus/epoch_bound": 3.0, "zeus/cost_j": 110.0, "zeus/target_reached": 1.0}
        | {"zeus/trial_time_s": 2.0, "zeus/trial_energy_j": 20.0},
    ]


def test_first_report_at_the_target_is_reported(url: str, caplog: pytest.LogCaptureFixture) -> None:
    launched(url, Net(), 0.95)
    assert "val_acc was 0.95 at the first report, at or above the target 0.9" in caplog.text
    caplog.clear()
    launched(url, Net(), 0.5, 0.95)
    assert caplog.text == ""
