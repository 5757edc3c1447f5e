"""`ZeusDataLoader` with real passes over data and a meter with known figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.support import ROOT
from tests.support.job_bench import CountingMonitor
from tests.support.power_limit_bench import ReplayMachine, ReplayPoint
from tests.support.properties import examples
from tests.support.ranks import run_ranks
from tests.support.warm import LIGHTNING
from zeus_plugins.dataloader.loader import ZeusDataLoader
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.power_limit import PowerLimitProfile

# Each batch of 4 takes 1 s and 10 J; at η = 0.5 and a maximum of 100 W, the cost is 55 J.
STEP_COST_J = 0.5 * 10 + 0.5 * 100 * 1
DATA: Dataset[Any] = TensorDataset(torch.arange(8.0))  # two batches of 4
EVALUATION: Dataset[Any] = TensorDataset(torch.arange(4.0))  # one batch
EPOCH_COST_J = 3 * STEP_COST_J


class Bench:
    """A training and an evaluation loader, and a monitor that counts their steps."""

    def __init__(self, directory: Path, *, max_epochs: int = 10, **environ: str) -> None:
        self.steps = 0
        self.meter = CountingMonitor(lambda: self.steps)
        environ = {
            "ZEUS_LOG_DIR": str(directory),
            "ZEUS_JOB_ID": "rec03+try02",
            "ZEUS_TARGET_METRIC": "0.9",
            "ZEUS_ETA_KNOB": "0.5",
            **environ,
        }
        self.train: ZeusDataLoader[Any] = ZeusDataLoader(
            DATA, 4, max_epochs=max_epochs, monitor=self.meter, environ=environ
        )
        self.evaluate: ZeusDataLoader[Any] = ZeusDataLoader(EVALUATION, 4)
        self.result_path = directory / "rec03+try02+bs4.train.json"

    def step(self, loader: ZeusDataLoader[Any]) -> None:
        for _ in loader:
            self.steps += 1

    def run(self, metrics: Iterator[float]) -> list[int]:
        epochs = []
        for epoch in self.train.epochs():
            epochs.append(epoch)
            self.step(self.train)
            self.step(self.evaluate)
            self.steps += 7  # Steps between passes do not count.
            self.train.report_metric(next(metrics))
        return epochs

    @property
    def result(self) -> Any:
        return json.loads(self.result_path.read_text())


def test_training_at_the_target_records_the_cost(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "made")
    assert bench.run(iter([0.5, math.nan, 0.95])) == [0, 1, 2]
    assert bench.train.reached
    assert bench.result == {
        "energy": 90.0,
        "time": 9.0,
        "cost": 3 * EPOCH_COST_J,
        "num_epochs": 10,
        "reached": True,
        "end_epoch": 3,
        "metric": 0.95,
        "energy_source": "counted steps",
    }
    assert [path.name for path in (tmp_path / "made").iterdir()] == [bench.result_path.name]


def test_script_may_leave_the_loop_at_the_target(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in bench.train.epochs():
        bench.step(bench.train)
        bench.train.report_metric(0.9)
        if bench.train.reached:
            break
    assert (bench.result["reached"], bench.result["end_epoch"], bench.result["time"]) == (True, 1, 2.0)


def test_lower_metric_may_be_better(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in bench.train.epochs():
        bench.train.report_metric(1.5 - bench.train.dataset[0][0].item() - 0.7, higher_is_better_metric=False)
    assert bench.result["reached"]
    assert bench.result["metric"] == pytest.approx(0.8)


@given(st.floats(0.0, 20.0), st.integers(1, 12), st.integers(1, 30))
@settings(deadline=None, max_examples=examples(60))
def test_epoch_crossing_the_threshold_does_not_begin(
    tmp_path_factory: pytest.TempPathFactory, threshold_epochs: float, max_epochs: int, reached_at: int
) -> None:
    threshold_j = threshold_epochs * EPOCH_COST_J
    bench = Bench(tmp_path_factory.mktemp("run"), max_epochs=max_epochs, ZEUS_COST_THRESH=str(threshold_j))
    trained = len(bench.run(0.9 if epoch == reached_at else 0.1 for epoch in range(1, 99)))
    # The first epoch shows the cost of an epoch.
    affordable = max(1, int(threshold_j / EPOCH_COST_J))
    assert trained == min(affordable, max_epochs, reached_at)
    assert bench.result["reached"] == (reached_at <= min(affordable, max_epochs))
    assert bench.result["cost"] == pytest.approx(trained * EPOCH_COST_J)
    assert trained == 1 or bench.result["cost"] <= threshold_j


def test_exception_leaves_no_result_and_an_interrupted_pass_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def train() -> None:
        for _ in bench.train.epochs():
            for _ in bench.train:
                bench.steps += 1
                break
            bench.step(bench.evaluate)
            raise RuntimeError("the data are gone")

    with pytest.raises(RuntimeError, match="the data are gone"):
        train()
    assert not bench.result_path.exists()
    assert bench.meter.open_windows == []
    assert bench.train._training is not None
    assert bench.train._training.time_s == 2.0


def test_loaders_must_be_used_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(ZeusBSOOperationOrderError, match="train inside"):
        next(iter(bench.train))
    with pytest.raises(ZeusBSOOperationOrderError, match=r"epochs\(\) is a matter of the training loader"):
        next(iter(bench.evaluate.epochs()))
    with pytest.raises(ZeusBSOOperationOrderError, match=r"report_metric\(\) is a matter of the training loader"):
        bench.evaluate.report_metric(0.5)
    with pytest.raises(ZeusBSOOperationOrderError, match="report the metric inside"):
        bench.train.report_metric(0.5)
    bench.step(bench.evaluate)  # Before the training: not counted.
    bench.run(iter([1.0]))
    bench.step(bench.evaluate)  # After the training: not counted either.
    assert bench.result["time"] == 3.0
    with pytest.raises(ZeusBSOOperationOrderError, match="a loader trains once"):
        next(iter(bench.train.epochs()))


def test_passes_must_not_overlap(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in bench.train.epochs():
        first = iter(bench.train)
        next(first)
        with pytest.raises(ZeusBSOBadOperationError, match="finish one pass"):
            next(iter(bench.evaluate))
        del first
        bench.train.report_metric(1.0)


def test_evaluation_loader_requires_a_training_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZeusDataLoader, "_latest", None)
    with pytest.raises(ZeusBSOConfigError, match="belongs to a training loader, and there is none"):
        ZeusDataLoader(EVALUATION, 4)
    first, second = Bench(tmp_path / "1"), Bench(tmp_path / "2")
    of_first: ZeusDataLoader[Any] = ZeusDataLoader(EVALUATION, 4, train_loader=first.train)
    for _ in first.train.epochs():
        for _ in of_first:
            first.steps += 1
        first.train.report_metric(1.0)
    assert first.result["time"] == 1.0
    assert second.steps == 0


@pytest.mark.parametrize(
    ("environ", "options", "says"),
    [
        ({"ZEUS_TARGET_METRIC": ""}, {}, "ZEUS_TARGET_METRIC is not set"),
        ({"ZEUS_TARGET_METRIC": "high"}, {}, "ZEUS_TARGET_METRIC is 'high': set it to a number"),
        ({"ZEUS_COST_THRESH": "nan"}, {}, "ZEUS_COST_THRESH is 'nan'"),
        ({"ZEUS_ETA_KNOB": "2"}, {}, "ZEUS_ETA_KNOB is 2.0: η lies between 0 and 1"),
        ({}, {"max_epochs": 0}, "max_epochs is 0"),
        ({}, {"batch_size": 0}, "batch_size is 0"),
        ({}, {"distributed": "ddp"}, "distributed is 'ddp': choose 'dp'"),
        ({}, {"distributed": "dp"}, "needs torch.distributed.init_process_group first"),
        ({}, {"sampler": DistributedSampler(DATA, 2, 0)}, "pass distributed='dp' too"),
    ],
)
def test_unusable_setting_is_reported(environ: dict[str, str], options: dict[str, Any], says: str) -> None:
    needed: dict[str, Any] = {"batch_size": 4, "max_epochs": 1, "monitor": CountingMonitor(int)}
    with pytest.raises(ZeusBSOConfigError, match=says.replace("(", r"\(").replace(".", r"\.")):
        ZeusDataLoader(DATA, **needed | {"environ": {"ZEUS_TARGET_METRIC": "0.9", **environ}} | options)


@pytest.mark.slow
def test_example_works_without_a_master(tmp_path: Path) -> None:
    script = ROOT / "examples" / "master" / "digits.py"
    arguments = ["--batch-size", "64", "--lr", "0.003", "--epochs", "2", "--seed", "1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "ZEUS_TARGET_METRIC": "0.999", "ZEUS_ESTIMATED_POWER_W": "50"}
    for name in ("ZEUS_LOG_DIR", "ZEUS_JOB_ID"):
        environ.pop(name, None)
    done = subprocess.run([sys.executable, script, *arguments], cwd=tmp_path, env=environ, check=False, timeout=240)
    assert done.returncode == 0
    result = json.loads((tmp_path / "zeus_log" / "rec01+try01+bs64.train.json").read_text())
    assert (result["reached"], result["end_epoch"], result["num_epochs"]) == (False, 2, 2)
    assert 0.5 < result["metric"] < 0.999
    assert result["energy_source"].startswith("estimate: 50 W stated × CPU time / ")
    assert 0 < result["energy"] <= 50 * result["time"] * 1.1


# --- Power limits of a replayed machine -------------------------------------------------------------------------------


# Cost per step at η = 0.5 and a maximum of 200 W. 150 W: 1.2·(75 + 100) = 210 J; 175 W: 183.75 J; 200 W: 1·(100 + 100)
# = 200 J.
TABLE = {150.0: ReplayPoint(1.2, 150.0), 175.0: ReplayPoint(1.05, 150.0), 200.0: ReplayPoint(1.0, 200.0)}
STEPS = 20


def trained(
    directory: Path, machine: ReplayMachine, *, epochs: int = 3, fails: bool = False, **environ: str
) -> list[float]:
    """Train and return the limit in force at the end of each step."""
    required = {"ZEUS_TARGET_METRIC": "1", "ZEUS_LOG_DIR": str(directory), "ZEUS_PROFILE_PARAMS": "1,4"}
    loader: ZeusDataLoader[Any] = ZeusDataLoader(
        TensorDataset(torch.arange(float(STEPS))),
        1,
        max_epochs=epochs,
        monitor=machine.monitor,
        devices=machine.devices,
        environ=required | environ,
    )
    limits = []
    for _ in loader.epochs():
        for _ in loader:
            machine.train()
            limits.append(machine.devices[0].limit_w())
        if fails:
            raise RuntimeError("the data are gone")
        loader.report_metric(0.0)
    return limits


def result_of(directory: Path) -> Any:
    return json.loads((directory / "rec01+try01+bs1.train.json").read_text())


def test_best_limit_is_found_kept_and_restored(tmp_path: Path) -> None:
    machine = ReplayMachine(TABLE)
    limits = trained(tmp_path, machine)
    assert limits[:15] == [200.0] * 5 + [175.0] * 5 + [150.0] * 5
    assert limits[15:] == [175.0] * (3 * STEPS - 15)
    assert machine.devices[0].limit_w() == 200.0
    result = result_of(tmp_path)
    assert result["power_limit_w"] == 175.0
    assert result["time"] == pytest.approx(5 * 1.0 + 5 * 1.05 + 5 * 1.2 + 45 * 1.05)
    profile = PowerLimitProfile.load(tmp_path / "bs1.power.json")
    assert profile is not None
    assert profile.limits_w == (150.0, 175.0, 200.0)


def test_later_run_in_the_same_directory_skips_the_profile(tmp_path: Path) -> None:
    trained(tmp_path, ReplayMachine(TABLE))
    assert set(trained(tmp_path, ReplayMachine(TABLE), epochs=1)) == {175.0}


def test_crash_restores_the_limit(tmp_path: Path) -> None:
    machine = ReplayMachine(TABLE)
    with pytest.raises(RuntimeError, match="the data are gone"):
        trained(tmp_path, machine, fails=True)
    assert machine.devices[0].limit_w() == 200.0


def test_without_parameters_no_limit_is_changed(tmp_path: Path) -> None:
    machine = ReplayMachine(TABLE)
    assert set(trained(tmp_path, machine, ZEUS_PROFILE_PARAMS="")) == {200.0}
    assert "power_limit_w" not in result_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ZEUS_PROFILE_PARAMS", "10", "ZEUS_PROFILE_PARAMS is '10'"),
        ("ZEUS_PROFILE_PARAMS", "a,b", "ZEUS_PROFILE_PARAMS is 'a,b'"),
        ("ZEUS_USE_OPTIMAL_PL", "False", "ZEUS_USE_OPTIMAL_PL=False is gone: unset ZEUS_PROFILE_PARAMS to leave"),
    ],
)
def test_invalid_variables_are_reported(tmp_path: Path, name: str, value: str, says: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=says):
        trained(tmp_path, ReplayMachine(TABLE), **{name: value})


@pytest.mark.slow
def test_data_loader_measures_each_machine_once_without_information_from_the_launcher(tmp_path: Path) -> None:
    command = ["tests.training.test_dataloader", str(tmp_path)]
    status = run_ranks(*command, modules=LIGHTNING, output=tmp_path / "output")
    assert status == [0, 0], (tmp_path / "output").read_text()
    result = json.loads((tmp_path / "rec01+try01+bs2.train.json").read_text())
    assert (result["reached"], result["end_epoch"]) == (True, 2)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["limits_w"] == [150.0, 175.0, 200.0]
    assert second["limits_w"] == [200.0]  # it controls no limit
    joules = {"150.0": 180.0, "175.0": 157.5, "200.0": 200.0}  # of one machine
    assert first["energy_j"] == second["energy_j"] == pytest.approx(joules)


# A rank under a launcher that sets no LOCAL_RANK: ``python -m tests.training.test_dataloader FOLDER``.


def refuse(text: str, **options: Any) -> None:
    with pytest.raises(ZeusBSOConfigError, match=text):
        ZeusDataLoader(TensorDataset(torch.arange(16.0)), max_epochs=3, distributed="dp", **options)


def main(folder: str) -> None:
    """Train to the target, in the second epoch; write down the limits of this rank's device and the measurements."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    machine = ReplayMachine(TABLE)
    data = TensorDataset(torch.arange(2.0 * STEPS))
    refuse("without it, every rank trains on all data", batch_size=8)
    refuse("cannot be spread evenly over 2 ranks", batch_size=7, sampler=DistributedSampler(data))
    refuse("is for rank 0 of 3", batch_size=8, sampler=DistributedSampler(data, 3, 0))
    loader: ZeusDataLoader[Any] = ZeusDataLoader(
        data,
        batch_size=2,
        max_epochs=5,
        distributed="dp",
        sampler=DistributedSampler(data),
        monitor=machine.monitor,
        devices=machine.devices,
        environ={"ZEUS_TARGET_METRIC": "1", "ZEUS_LOG_DIR": folder, "ZEUS_PROFILE_PARAMS": "0,1"},
    )
    limits_w = set()
    seen: list[list[float]] = []
    for epoch in loader.epochs():
        seen.append([])
        for (batch,) in loader:
            seen[-1] += batch.tolist()
            machine.train()
            limits_w.add(machine.devices[0].limit_w())
        loader.report_metric(1.0 if rank == 0 and epoch == 1 else 0.0)  # only rank 0's metric counts
    assert [len(samples) for samples in seen] == [STEPS] * 2
    assert seen[0] != seen[1], "set_epoch was not called"
    training = loader._training
    profile = None if training is None or training._profiler is None else training._profiler.profile
    told = {
        "limits_w": sorted(limits_w),
        "energy_j": {} if profile is None else {each.limit_w: each.energy_per_step_j for each in profile.samples},
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
