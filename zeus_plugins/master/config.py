"""The file that describes a recurring job to ``zeus-plugins master``."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.job import Job
from zeus_plugins.protocol import BatchSize, GpuConfig, PositiveInt, Seed
from zeus_plugins.training.lr_scaling import LrScaling

__all__ = ["MasterConfig", "read_config"]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JobTable(_Table):
    """``[job]``: the fields of `zeus_plugins.master.Job`; `workdir` is relative to the file.

    ``[job.fields]`` holds more values for the command.
    """

    name: str
    dataset: str
    network: str
    optimizer: str
    target_metric: float
    max_epochs: PositiveInt
    default_bs: BatchSize
    default_lr: float
    command: str | list[str]
    workdir: Path = Path()
    lr_scaling: LrScaling = LrScaling.LINEAR
    higher_is_better_metric: bool = True
    fields: dict[str, str | int | float] = {}  # pydantic copies defaults


class MasterTable(_Table):
    """``[master]``: what `ZeusMaster` and its `run` take.

    Attributes:
        batch_sizes: Sizes to choose from.
        recurrences: Number of recurrences, unless the command line says otherwise.
        eta_knob: η of the cost.
        beta_knob: β of the cost bound; ``inf``: none.
        seed: Seed of the first run.
        observer_mode: As in `ZeusMaster`, and so are the others.
    """

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
    """``[optimizer]``: who chooses batch sizes.

    Attributes:
        kind: ``"server"``: the batch size optimization server; ``"policy"``: its policies, in the master's
            process.
        server_url: The server. None: ``ZEUS_SERVER_URL``, and without that one the server in this process.
        options: Fields of `JobSpec` for the server, or arguments of `PolicyOptimizer`.
    """

    kind: Literal["server", "policy"] = "server"
    server_url: str | None = None
    options: dict[str, Any] = {}  # pydantic copies defaults


class ExecutorTable(_Table):
    """``[executor]``: where the script runs.

    Attributes:
        kind: ``"local"``: on this machine; ``"slurm"``: as jobs of a Slurm cluster, by submitit.
        parameters: Arguments of submitit's ``AutoExecutor.update_parameters``.
    """

    kind: Literal["local", "slurm"] = "local"
    parameters: dict[str, Any] = {}  # pydantic copies defaults


class MasterConfig(_Table):
    """The whole file; ``[gpus]`` states `GpuConfig` where the script runs on other devices than this machine's."""

    job: JobTable
    master: MasterTable
    optimizer: OptimizerTable = OptimizerTable()
    executor: ExecutorTable = ExecutorTable()
    gpus: GpuConfig | None = None


def read_config(path: Path) -> tuple[MasterConfig, Job]:
    """Read the file; also the job that it describes.

    Raises:
        ZeusBSOConfigError: It cannot be read, or a field is wrong, missing or unknown.
    """
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
    job = Job(**{**config.job.model_dump(), "workdir": path.absolute().parent / config.job.workdir})
    return config, job
