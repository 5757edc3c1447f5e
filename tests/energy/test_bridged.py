"""Temporary counter errors: no callback ends a training, and the gap is estimated and labelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.contract_double import CONVERGED, KEEP_TRAINING, ContractDouble
from tests.support.fake_nvml import Clock, FakeGpu, FakeNvml
from tests.support.replay import ReplayMonitor
from tests.support.reporting import warnings_in
from zeus_plugins.dataloader import ZeusDataLoader
from zeus_plugins.energy import EnergyUnavailableError, Measurement, NvmlMonitor
from zeus_plugins.energy.monitor import BridgedMonitor
from zeus_plugins.protocol import GpuConfig, JobSpec
from zeus_plugins.training.session import TrialSession


class Machine:
    """A GPU that draws 200 W of at most 700 W, on a simulated clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.gpu = FakeGpu()
        self.nvml = FakeNvml([self.gpu])
        self.monitor = NvmlMonitor(nvml=self.nvml, clock=self.clock)

    def train(self, time_s: float) -> None:
        self.clock.now_s += time_s
        self.gpu.spend(round(200_000 * time_s))


@pytest.mark.parametrize("strict", [True, False])
def test_temporary_error_costs_a_single_estimated_window(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    here = Machine()
    monitor = BridgedMonitor(here.monitor, strict=strict, clock=here.clock)
    for failures, expected in ((0, "nvml"), (1, "estimate: 200 W, as it cannot be measured"), (0, "nvml")):
        monitor.begin_window("epoch")
        here.train(2.0)
        here.gpu.passing_failures = failures
        assert monitor.end_window("epoch") == Measurement(2.0, 400.0, expected)
    assert len(warnings_in(caplog)) == 1


def test_lasting_failure_is_an_error_if_estimates_are_forbidden() -> None:
    here = Machine()
    monitor = BridgedMonitor(here.monitor, strict=True, clock=here.clock)
    monitor.begin_window("epoch")
    here.gpu.counter_mj = None
    with pytest.raises(EnergyUnavailableError, match="gives no energy counter"):
        monitor.end_window("epoch")


def test_trial_survives_a_temporary_error_and_states_the_estimate(caplog: pytest.LogCaptureFixture) -> None:
    here, server = Machine(), ContractDouble(KEEP_TRAINING, KEEP_TRAINING, CONVERGED)
    job = JobSpec(job_id="mnist-1", job_id_prefix="mnist", batch_sizes=(32, 64), default_batch_size=32)
    session = TrialSession(job, server.client(), here.monitor)
    session.ask()
    session.begin_measurement()
    here.train(10.0)
    session.report_evaluation(0.1, 1)
    here.gpu.passing_failures = 1
    session.state_dict()  # a checkpoint
    session.report_evaluation(0.2, 2)
    here.train(5.0)
    session.report_evaluation(0.9, 3)
    session.end()
    assert [body["current_epoch"] for body in server.sent("POST", "/report")] == [1, 2, 3]
    last = server.sent("POST", "/report")[-1]
    assert last["energy"] == pytest.approx(3000.0, rel=0.01)
    assert last["energy_source"].startswith("nvml + estimate: 200 W, as it cannot be measured")
    assert server.sent("PATCH", "/trials") == []
    assert len(warnings_in(caplog)) == 1


def test_data_loader_continues_and_the_result_states_the_estimate(tmp_path: Path) -> None:
    class OnceFailing(ReplayMonitor):
        def end_window(self, name: str) -> Measurement:
            measured = super().end_window(name)
            if measured.source == "fails":
                raise EnergyUnavailableError(f"Unknown Error at {name}")
            return measured

    parts = [Measurement(1.0, 10.0, source) for source in ("nvml", "fails", "nvml", "nvml")]
    monitor = OnceFailing(parts, GpuConfig(max_power=100, number_of_gpus=1, gpu_model="told"))
    environ = {"ZEUS_LOG_DIR": str(tmp_path), "ZEUS_JOB_ID": "rec01+try01", "ZEUS_TARGET_METRIC": "0.9"}
    loader: ZeusDataLoader[Any] = ZeusDataLoader(
        TensorDataset(torch.arange(8.0)), 4, max_epochs=3, monitor=monitor, environ=environ
    )
    for epoch in loader.epochs():
        assert len(list(loader)) == 2
        loader.report_metric(0.5 * epoch)
    result = json.loads((tmp_path / "rec01+try01+bs4.train.json").read_text())
    assert result["energy_source"] == "nvml + estimate: 10 W, as it cannot be measured"
