"""Public names of the training side, as each public module lists them."""

from __future__ import annotations

import importlib

import pytest

import zeus_plugins
from zeus_plugins import errors, huggingface, lightning, protocol, testing

ERRORS = (
    *("ZeusBSOBadOperationError", "ZeusBSOConfigError", "ZeusBSOError", "ZeusBSOOperationOrderError"),
    *("ZeusBSORuntimeError", "ZeusBSOServerUnreachableError", "ZeusBSOTokenError", "ZeusBSOTrainFailError"),
)
CALLBACKS = ("BatchSizeCallback", "EnergyCallback", "PowerLimitCallback")
PUBLIC = {
    "zeus_plugins": {"BatchSizeOptimizer", "JobSpec", *ERRORS},
    "zeus_plugins.client": {
        *("BsoClient", "EMBEDDED", "NO_RETRIES", "Retries", "ServerPort", "client_from_environment"),
    },
    "zeus_plugins.dataloader": {"ZeusDataLoader"},
    "zeus_plugins.energy": {
        *(
            "ClusterMonitor",
            "DEFAULT_ESTIMATED_POWER_W",
            "EnergyMonitor",
            "EnergyUnavailableError",
        ),
        *("EpochMeter", "EstimateMonitor", "Measurement", "NvmlMonitor", "NvmlPowerMonitor"),
        "RaplMonitor",
        *("WindowMonitor", "ZeusMonitorAdapter", "as_energy_monitor", "auto"),
    },
    "zeus_plugins.errors": {"ZeusBSORuntimError", *ERRORS},
    "zeus_plugins.huggingface": {
        *("ZeusBSOTrainerCallback", "ZeusEnergyTrainerCallback", "ZeusPowerLimitTrainerCallback", *CALLBACKS),
    },
    "zeus_plugins.lightning": {"ZeusBSOCallback", "ZeusEnergyCallback", "ZeusPowerLimitCallback", *CALLBACKS},
    "zeus_plugins.master": {
        *("FailedTryError", "Job", "MasterState"),
        *("Run", "ServerOptimizer", "ZeusMaster"),
    },
    "zeus_plugins.optimizer": {"BatchSizeOptimizer"},
    "zeus_plugins.power_limit": {
        *("Energy", "MaxSlowdown", "NvmlDevice", "OptimumSelector", "PowerLimitDevice", "PowerLimitProfile"),
        *("PowerLimitProfiler", "PowerLimitSample", "PowerLimitUnavailableError", "Time", "ZeusCost", "find_devices"),
    },
    "zeus_plugins.train_result": {"TrainResult", "result_path", "write_atomically"},
}


@pytest.mark.parametrize(("module", "names"), PUBLIC.items())
def test_public_module_offers_exactly_the_listed_names(module: str, names: set[str]) -> None:
    imported = importlib.import_module(module)
    assert len(imported.__all__) == len(set(imported.__all__))
    assert set(imported.__all__) == names
    assert all(hasattr(imported, name) for name in names)


def test_protocol_offers_the_messages_of_zeus() -> None:
    """The package's own file lists the other names, which both packages use, by importing them as themselves."""
    messages = {"CreatedJob", "GpuConfig", "JobParams", "JobSpec", "JobSpecFromClient", "ReportResponse"}
    assert messages | {"TrainingResult", "TrialId"} <= set(dir(protocol))


def test_common_errors_are_importable_beside_the_job() -> None:
    assert all(getattr(zeus_plugins, name) is getattr(errors, name) for name in ERRORS)


def test_zeus_spelling_of_an_error_is_an_alias() -> None:
    assert errors.ZeusBSORuntimError is errors.ZeusBSORuntimeError
    assert errors.ZeusBSORuntimeError.__name__ == "ZeusBSORuntimeError"


@pytest.mark.parametrize(("name", "instead"), [("ReplayMonitor", "EstimateMonitor"), ("check_policy", "policy-custom")])
def test_removed_helper_of_tests_names_the_replacement(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} was removed: .*{instead}"):
        getattr(testing, name)


def test_short_names_are_the_same_callbacks() -> None:
    assert lightning.BatchSizeCallback is lightning.ZeusBSOCallback
    assert lightning.EnergyCallback is lightning.ZeusEnergyCallback
    assert lightning.PowerLimitCallback is lightning.ZeusPowerLimitCallback
    assert huggingface.BatchSizeCallback is huggingface.ZeusBSOTrainerCallback
    assert huggingface.EnergyCallback is huggingface.ZeusEnergyTrainerCallback
    assert huggingface.PowerLimitCallback is huggingface.ZeusPowerLimitTrainerCallback
