"""Search for a power limit within a training, on a simulated machine with literal values, without a framework."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_trainer import FakeTrainer
from tests.support.frameworks import Powered
from tests.support.power_limit_bench import BEST_W, FOUND_W, TABLE, is_as_the_table, machine
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit import PowerLimitProfile, PowerLimitSample
from zeus_plugins.power_limit.profile import profile_path_of
from zeus_plugins.protocol import GpuConfig, PowerLimitChoice
from zeus_plugins.training.power_run import PowerLimitFindings
from zeus_plugins.training.trial import TrialInfo

SIZE = 16
TRIAL = TrialInfo(job_id="a", batch_size=64, trial_number=1)


class Keeper:
    """A batch-size callback as seen by a search."""

    def __init__(self) -> None:
        self.trial = TRIAL
        self.kept: list[tuple[float | None, int | None, bool]] = []

    def keep_power_limits(self, choice: PowerLimitChoice, *, has_measured: bool) -> None:
        self.kept.append((choice.power_limit_w, choice.power_limits, has_measured))


class Training(Powered):
    """A framework that trains on a simulated machine, with interruptions between steps."""

    def __init__(self, keeper: Keeper | None = None, *, rank: int = 0, steps: int | None = 20, **options: Any) -> None:
        super().__init__()
        ranks = FakeTrainer()
        ranks.rank = rank
        self.logged: list[dict[str, float]] = []
        self.found = PowerLimitFindings(**self.options(**options))
        self.run = self.found._run
        self.run.begin(ranks, SIZE, keeper=keeper, log=self.logged.append)
        if steps is not None:
            self.run.begin_steps(steps)

    @property
    def samples(self) -> tuple[PowerLimitSample, ...]:
        assert self.found.profile is not None
        return self.found.profile.samples

    def steps(self, count: int) -> list[float]:
        """Train `count` steps; return the limit of each step."""
        for _ in range(count):
            self.batch()
            self.run.end_step()
        return self.limits_of_steps[-count:]


@pytest.fixture(name="training")
def make_training() -> Training:
    return Training()


def known(*limits_w: float, gpu_model: str = "replayed GPU") -> PowerLimitProfile:
    samples = [
        PowerLimitSample(
            limit_w=limit_w,
            steps=2,
            time_s=2 * TABLE[limit_w].time_per_step_s,
            energy_j=2 * TABLE[limit_w].time_per_step_s * TABLE[limit_w].average_power_w,
            source="replay",
        )
        for limit_w in limits_w
    ]
    gpus = GpuConfig(max_power=250.0, number_of_gpus=1, gpu_model=gpu_model)
    return PowerLimitProfile(gpus=gpus, batch_size=TRIAL.batch_size, samples=samples)


def test_best_limit_is_found_kept_and_restored(training: Training) -> None:
    limits_w = training.steps(14)
    assert limits_w == [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 3 + [BEST_W] * 2
    assert training.found.chosen_limit_w == BEST_W
    assert is_as_the_table(training.found.profile)
    assert training.logged == [{"zeus/power_limit_w": BEST_W}]
    training.run.end_steps()
    assert training.device.limit_w() == BEST_W
    training.run.close()
    assert training.device.limit_w() == FOUND_W
    # The result remains available.
    assert training.found.chosen_limit_w == BEST_W


def test_limit_does_not_change_before_steps_begin() -> None:
    training = Training(steps=None)
    assert training.steps(3) == [FOUND_W] * 3
    assert training.device.set_w == []


def test_interruption_is_not_measured(training: Training) -> None:
    training.steps(2)
    training.run.interrupt()
    training.be_slow()
    training.run.resume()
    # The interrupted limit starts again with its warm-up.
    assert training.steps(12) == [250.0] * 3 + [200.0] * 3 + [150.0] * 3 + [100.0] * 3
    assert is_as_the_table(training.found.profile)


def test_checkpoint_between_two_steps_is_not_measured(training: Training) -> None:
    training.steps(2)
    training.be_slow()
    training.run.disturb()
    assert training.steps(4) == [250.0] * 3 + [200.0]
    assert [sample.time_per_step_s for sample in training.samples] == [pytest.approx(0.95)]


def test_checkpoint_within_an_interruption_does_not_end_the_interruption() -> None:
    training = Training(warmup_steps=0)
    training.run.interrupt()
    training.run.disturb()
    training.be_slow()
    training.run.resume()
    training.steps(2)
    assert [sample.time_per_step_s for sample in training.samples] == [pytest.approx(0.95)]


def test_resume_without_an_interruption_changes_nothing(training: Training) -> None:
    training.run.end_steps()
    training.run.resume()
    assert training.steps(5) == [FOUND_W] * 5
    # The end of an epoch also ends an interruption within it.
    training.run.begin_steps(20)
    training.run.interrupt()
    training.run.end_steps()
    training.run.resume()
    assert training.steps(5) == [FOUND_W] * 5
    assert training.samples == ()


@pytest.mark.parametrize(
    ("steps", "limits_w", "chosen_w"),
    [(14, (100.0, 150.0, 200.0, 250.0), BEST_W), (6, (200.0, 250.0), None)],
    ids=["finished", "unfinished"],
)
def test_search_is_kept_once_in_the_file_and_in_reports(
    tmp_path: Path, steps: int, limits_w: tuple[float, ...], chosen_w: float | None
) -> None:
    keeper = Keeper()
    training = Training(keeper, profile_path=tmp_path / "{batch_size}.json")
    training.steps(steps)
    training.run.end_steps()
    training.run.keep_unfinished()
    assert keeper.kept == [(chosen_w, len(limits_w), True)]
    profile = PowerLimitProfile.load(tmp_path / "64.json")
    assert profile is not None
    assert profile.limits_w == limits_w
    assert bool(training.logged) is (chosen_w is not None)


def test_limits_of_an_earlier_run_of_the_job_are_not_measured_again() -> None:
    path = profile_path_of("a", 64)
    known(250.0, 200.0, 150.0).save(path)
    for steps, limits_w in ((5, [100.0] * 3 + [BEST_W] * 2), (3, [BEST_W] * 3)):
        keeper = Keeper()
        assert Training(keeper).steps(steps) == limits_w
        assert keeper.kept == [(BEST_W, 4, 100.0 in limits_w)]
    assert is_as_the_table(PowerLimitProfile.load(path))


def test_limits_of_other_gpus_are_measured_again() -> None:
    known(*TABLE, gpu_model="another GPU").save(profile_path_of("a", 64))
    assert Training(Keeper()).steps(3) == [250.0] * 3


def test_each_job_and_size_has_its_own_file(state_directory: Path) -> None:
    pairs = [(job_id, size) for job_id in ("a", "A", "x" * 250, "x" * 251, "..") for size in (6, 64)]
    paths = {profile_path_of(*pair) for pair in pairs}
    assert len({str(path).lower() for path in paths}) == len(pairs)
    for path in paths:
        known(250.0).save(path)
    assert set((state_directory / "power-profiles").iterdir()) == paths


def test_without_a_measurement_nothing_is_kept(state_directory: Path) -> None:
    keeper = Keeper()
    training = Training(keeper)
    training.steps(1)
    training.run.keep_unfinished()
    assert keeper.kept == []
    assert not (state_directory / "power-profiles").exists()


def test_without_a_trial_the_given_size_counts(tmp_path: Path) -> None:
    training = Training(profile_path=tmp_path / "{batch_size}.json")
    training.steps(12)
    profile = PowerLimitProfile.load(tmp_path / "16.json")
    assert profile is not None
    assert profile.batch_size == SIZE


def test_further_ranks_store_and_log_nothing(tmp_path: Path) -> None:
    keeper = Keeper()
    training = Training(keeper, rank=1, profile_path=tmp_path / "power.json")
    training.steps(6)
    training.run.keep_unfinished()
    training.steps(8)
    assert (keeper.kept, training.logged, list(tmp_path.iterdir())) == ([], [], [])


def test_trainer_is_released_after_the_end() -> None:
    class Rank(FakeTrainer):
        """A trainer that only its run may still reference."""

    ranks = Rank()
    ranks.world_size = 2  # the run gathers through the trainer
    found = PowerLimitFindings(energy_monitor=machine().monitor, devices=[])
    run = found._run
    run.begin(ranks, SIZE, log=ranks.log)
    trainer = weakref.ref(ranks)
    del ranks
    gc.collect()
    assert trainer() is not None
    run.close()
    gc.collect()
    assert trainer() is None
    assert (found.profile, found.chosen_limit_w) == (None, None)


def test_calls_after_the_end_have_no_effect(training: Training) -> None:
    training.steps(4)
    training.run.close()
    training.run.close()
    training.run.begin_steps(20)
    training.run.resume()
    training.run.disturb()
    training.run.keep_unfinished()
    assert training.steps(5) == [FOUND_W] * 5
    assert training.logged == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"profile_steps": 0}, "profile_steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"limits_w": ()}, "limits_w is empty"),
        ({"energy_monitor": "nvml"}, "str is no energy monitor"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=says):
        Training(**options)
