"""The file that describes a recurring job to ``zeus-plugins master``."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.job import Job
from zeus_plugins.protocol import BatchSize, GpuConfig, PositiveInt, Seed


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MasterTable(_Table):
    """``[master]``: what `ZeusMaster` and its `run` take; the command line may say another number of recurrences."""

    batch_sizes: Annotated[list[BatchSize], Field(min_length=1)]
    recurrences: PositiveInt = 10
    eta_knob: Annotated[float, Field(ge=0, le=1)] = 0.5
    beta_knob: Annotated[float, Field(gt=0)] | None = 2.0
    seed: Seed = 123456
    monitor_path: Path | None = None
    observer_mode: bool = False
    profile_warmup_iters: int = 10
    profile_measure_iters: int = 40

    @field_validator("beta_knob")
    @classmethod
    def _infinite_is_none(cls, beta_knob: float | None) -> float | None:
        return None if beta_knob is None or math.isinf(beta_knob) else beta_knob


class OptimizerTable(_Table):
    """``[optimizer]``: the batch size optimization server chooses, or its policies in the master's process.

    Without a `server_url` it is that of ``ZEUS_SERVER_URL``, or else the server in this process. The options are fields
    of `JobSpec` for the server, or arguments of `PolicyOptimizer`.
    """

    kind: Literal["server", "policy"] = "server"
    server_url: str | None = None
    options: dict[str, Any] = {}  # pydantic copies defaults


class ExecutorTable(_Table):
    """``[executor]``: on this machine, or as jobs of a Slurm, Ray or Kubernetes cluster.

    The parameters are those of submitit's ``AutoExecutor``, or the arguments of `RayExecutor` or `KubeflowExecutor`.
    """

    kind: Literal["local", "slurm", "ray", "kubeflow"] = "local"
    parameters: dict[str, Any] = {}  # pydantic copies defaults


class MasterConfig(_Table):
    """The whole file.

    ``[job]`` has the fields of `Job`, with `workdir` relative to the file, and ``[job.fields]`` more values for the
    command. ``[gpus]`` states `GpuConfig` where the script runs on other devices than this machine's.
    """

    job: Job
    master: MasterTable
    optimizer: OptimizerTable = OptimizerTable()
    executor: ExecutorTable = ExecutorTable()
    gpus: GpuConfig | None = None


def read_config(path: Path) -> tuple[MasterConfig, Job]:
    """Read the file, and the job that it describes; what is wrong, missing or unknown is a `ZeusBSOConfigError`."""
    try:
        config = MasterConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ZeusBSOConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ZeusBSOConfigError(f"{path} is no TOML: {error}") from None
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}"
            for each in error.errors(include_url=False, include_context=False)
        )
        raise ZeusBSOConfigError(f"{path}: {problems}") from None
    return config, replace(config.job, workdir=path.absolute().parent / (config.job.workdir or ""))
