"""Trainings that are configured in files: LightningCLI (jsonargparse), Hydra, and plain mappings."""

from __future__ import annotations

import os
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

if not os.environ.get("CI"):
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse[signatures]")
    pytest.importorskip("hydra", reason="Hydra is not installed")
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

import hydra
from lightning.pytorch.cli import LightningCLI
from omegaconf import OmegaConf
from transformers import TrainerCallback

from tests.support.job_bench import AT_ONCE, NEXT_SIZE, SERVERS_SIZE, JobBench
from tests.support.lightning_bench import QUIET, AttributeData, Classifier
from tests.support.servers import ServerProcess
from zeus_plugins import BatchSizeOptimizer, JobSpec
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.huggingface import ZeusBSOTrainerCallback
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.protocol import GP_VOI, ZEUS, TrialState

pytestmark = [
    *QUIET,
    # LightningCLI keeps the Trainer's defaults, which cause such warnings.
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed as a dependency:UserWarning"),
    # LightningCLI uses a separate folder for each run and warns if the folder exists.
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning"),
]


@pytest.fixture(name="bench")
def make_bench(shared_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobBench:
    monkeypatch.chdir(tmp_path)
    # LightningCLI reads sys.argv to warn of duplicate arguments, and uses deprecated parts of jsonargparse.
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    return JobBench(shared_server, f"digits-{uuid.uuid4().hex}")


def fields(bench: JobBench, **others: Any) -> dict[str, Any]:
    """Return the fields of a job as a file contains them."""
    return {
        "job_id": bench.job_id,
        "job_id_prefix": "digits",
        "batch_sizes": [NEXT_SIZE, SERVERS_SIZE],
        "default_batch_size": SERVERS_SIZE,
        "target_metric": AT_ONCE,
        "max_epochs": 1,
        "policy": "zeus",
        "beta_knob": None,  # on a busy machine, the cost of trainings varies by large factors
        **others,
    }


def write_configuration(bench: JobBench, **arguments: Any) -> str:
    """Write a file that describes a whole training; return its path."""
    callback = {
        "class_path": "zeus_plugins.lightning.ZeusBSOCallback",
        "init_args": {"job": fields(bench), "monitor": "score", "server_url": bench.server.url, **arguments},
    }
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = {"accelerator": "cpu", "max_epochs": 1, "callbacks": [callback], **quiet}
    Path("training.yaml").write_text(yaml.safe_dump({"trainer": trainer, "data": {"batch_size": 16}}))
    return "training.yaml"


def command_line(*arguments: str) -> LightningCLI:
    return LightningCLI(Classifier, AttributeData, args=list(arguments), seed_everything_default=0)


def seen_sizes(cli: LightningCLI) -> set[int]:
    return set(cli.model.seen_sizes[:-1])


def callback_of(cli: LightningCLI) -> ZeusBSOCallback:
    trainer: Any = cli.trainer  # its list of callbacks is not declared
    (found,) = [each for each in trainer.callbacks if isinstance(each, ZeusBSOCallback)]
    return found


def policy_of(cli: LightningCLI) -> str | None:
    job = callback_of(cli)._wish.job
    assert job is not None
    return job.policy


# LightningCLI


def test_training_is_configured_entirely_in_yaml(bench: JobBench) -> None:
    cli = command_line("fit", "--config", write_configuration(bench))
    assert seen_sizes(cli) == {SERVERS_SIZE}
    assert bench.only_trial().state is TrialState.COMPLETED
    assert policy_of(cli) == ZEUS


def test_training_is_configured_entirely_by_arguments(bench: JobBench) -> None:
    callback, job = "--trainer.callbacks", fields(bench, policy="gp_voi")
    cli = command_line(
        "fit",
        *("--trainer.accelerator", "cpu", "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"),
        f"{callback}+=zeus_plugins.lightning.ZeusBSOCallback",
        *(f"{callback}.job.{name}={value}" for name, value in job.items() if value is not None),
        *(f"{callback}.monitor=score", f"{callback}.server_url={bench.server.url}", f"{callback}.lr_scaling=sqrt"),
        f"{callback}.energy_monitor=zeus_plugins.energy.EstimateMonitor",
        f"{callback}.energy_monitor.power_w=60",
    )
    assert seen_sizes(cli) == {SERVERS_SIZE}
    trial = bench.only_trial()
    assert trial.state is TrialState.COMPLETED
    assert (trial.energy_source or "").startswith("estimate: 60 W stated × CPU time / ")
    assert policy_of(cli) == GP_VOI


def test_job_arguments_without_a_jobspec_are_configured_in_yaml(bench: JobBench) -> None:
    said = {"target": AT_ONCE, "mode": "max", "batch_sizes": [NEXT_SIZE, SERVERS_SIZE], "max_epochs": 1}
    cli = command_line("fit", "--config", write_configuration(bench, job=None, job_id=bench.job_id, **said))
    fields = {"batch_sizes": (NEXT_SIZE, SERVERS_SIZE), "max_epochs": 1, "higher_is_better_metric": True}
    assert fields.items() <= callback_of(cli)._wish.fields.items()
    assert bench.only_trial().state is TrialState.COMPLETED


@pytest.mark.slow
def test_saved_configuration_trains_again(bench: JobBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEUS_SERVER_URL", raising=False)
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")
    first = command_line("fit", "--config", write_configuration(bench, server_url=None))
    (saved,) = Path.cwd().glob("lightning_logs/*/config.yaml")
    callback = yaml.safe_load(saved.read_text())["trainer"]["callbacks"][0]["init_args"]
    assert callback["job"]["eta_knob"] == 0.5
    again = command_line("fit", "--config", str(saved))
    assert [callback_of(cli).trial.trial_number for cli in (first, again)] == [1, 2]


def test_configuration_and_help_are_printed(bench: JobBench, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_configuration(bench)
    with pytest.raises(SystemExit) as ended:
        command_line("fit", "--config", file, "--print_config")
    printed = capsys.readouterr().out
    job = yaml.safe_load(printed)["trainer"]["callbacks"][0]["init_args"]["job"]
    assert (ended.value.code, job["batch_sizes"], job["policy"]) == (0, [NEXT_SIZE, SERVERS_SIZE], "zeus")
    with pytest.raises(SystemExit) as ended:
        command_line("fit", "--trainer.callbacks.help=zeus_plugins.lightning.ZeusBSOCallback")
    helped = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "Name under which the training logs the metric" in helped
    assert "{none,linear,sqrt,auto}" in helped
    assert not bench.is_registered()


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"patience": 3}, "Option 'patience' is not accepted"),
        ({"mode": "up"}, "mode"),
        ({"job": {"policy": "gp voi"}}, "policy: String should match pattern"),
        ({"job": {"default_batch_size": 33}}, "33 is not one of batch_sizes"),
        ({"job": {"max_epoch": 3}}, "did you mean 'max_epochs'"),
    ],
)
def test_invalid_argument_or_field_is_named_before_any_training(
    bench: JobBench, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any], problem: str
) -> None:
    job = fields(bench, **wrong.get("job", {}))
    with pytest.raises((SystemExit, ValueError)) as raised:
        command_line("fit", "--config", write_configuration(bench, **{**wrong, "job": job}))
    assert re.search(problem, f"{raised.value} {capsys.readouterr().err}")
    assert not bench.is_registered()


# Hydra


def composed(folder: Path, **nodes: Any) -> Any:
    """Return the configuration that a script under ``@hydra.main`` receives."""
    (folder / "training.yaml").write_text(yaml.safe_dump(nodes))
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("training", overrides=["job.max_epochs=2"])


@pytest.mark.parametrize("framework", ["lightning", "huggingface"])
@pytest.mark.parametrize("is_nested_target", [True, False], ids=["a nested target", "a mapping"])
def test_hydra_instantiates_the_callback(
    bench: JobBench, tmp_path: Path, framework: str, is_nested_target: bool
) -> None:
    name = {"lightning": "ZeusBSOCallback", "huggingface": "ZeusBSOTrainerCallback"}[framework]
    node = {"_target_": f"zeus_plugins.{framework}.{name}", "job": "${job}", "monitor": "score"}
    target = {"_target_": "zeus_plugins.JobSpec"} if is_nested_target else {}
    configuration = composed(tmp_path, job=fields(bench) | target, callback=node | {"server_url": bench.server.url})
    callback = hydra.utils.instantiate(configuration.callback)
    assert callback._wish.job == JobSpec(**fields(bench, max_epochs=2))
    assert isinstance(callback._wish.job.batch_sizes, tuple)
    assert isinstance(callback, ZeusBSOCallback if framework == "lightning" else TrainerCallback)


# Mappings

each_mapping = pytest.mark.parametrize("mapping", [dict, OmegaConf.create], ids=["dict", "OmegaConf"])


@each_mapping
def test_mapping_is_accepted_as_a_job(bench: JobBench, mapping: Any) -> None:
    job = mapping(fields(bench))
    expected = JobSpec(**fields(bench))
    assert ZeusBSOCallback(job, "score")._wish.job == ZeusBSOTrainerCallback(job, "score")._wish.job == expected
    with BatchSizeOptimizer(monitor=None, server_url=bench.server.url, job=job) as optimizer:
        assert optimizer.get_batch_size() == SERVERS_SIZE


@each_mapping
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"eta_knob": 2}, "eta_knob: Input should be less than or equal to 1"),
        ({"batch_sizes": [24, 0]}, r"batch_sizes\.1: Input should be greater than 0"),
        ({"default_batch_size": 33}, "default_batch_size: .*33 is not one of batch_sizes"),
        ({"max_epoch": 3}, "max_epoch.*max_epochs"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [ZeusBSOCallback, ZeusBSOTrainerCallback, lambda job, _: BatchSizeOptimizer(None, None, job)],
    ids=["Lightning", "Hugging Face", "plain"],
)
def test_invalid_field_of_a_mapping_is_named(
    bench: JobBench, make: Any, mapping: Any, wrong: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        make(mapping(fields(bench, **wrong)), "score")


@pytest.mark.parametrize("job", ["digits", ["digits"], 3])
def test_job_without_fields_is_refused(job: Any) -> None:
    with pytest.raises(ZeusBSOConfigError, match="give a JobSpec, or its fields as a dict"):
        ZeusBSOCallback(job, "score")
