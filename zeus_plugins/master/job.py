"""The description of a recurring training script, and the file with this description for ``zeus-plugins master``."""

from __future__ import annotations

import math
import re
import shlex
import string
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import ID_PATTERN, BatchSize, GpuConfig, PositiveInt, Seed, faults_in_words
from zeus_plugins.training.lr_scaling import LrScaling, lr_factor

# Fields of the command whose values differ between runs.
_RUN_FIELDS = frozenset({"batch_size", "learning_rate", "seed"})


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recurring training job, launched by a command without a shell.

    The command must contain ``{batch_size}``. It may contain ``{learning_rate}``, ``{seed}``, ``{target_metric}``,
    ``{epochs}``, ``{name}``, ``{dataset}``, ``{network}``, ``{optimizer}``, ``{python}`` (this interpreter) and the
    names in `fields`. Double a brace to keep it.

    Attributes:
        name: Name of the job in its log directory and on the batch size optimization server.
        dataset: Name of the training data.
        network: Name of the model.
        optimizer: Name of the optimizer, e.g. ``"adam"``.
        target_metric: Value of the validation metric at which the training is done.
        max_epochs: Largest number of epochs of a run.
        default_bs: Global batch size that you would use without an optimizer.
        default_lr: Learning rate at the default batch size.
        command: A list of program and arguments, or a string that is split as by a POSIX shell.
        workdir: Working directory of the command. None: the master's.
        lr_scaling: Rule by which the learning rate depends on the batch size: ``"linear"``, ``"sqrt"``, ``"none"``, or
            ``"auto"``, which chooses the rule by `optimizer` and leaves the rate unchanged below `default_bs`.
        higher_is_better_metric: True if the metric rises as the model improves.
        fields: Additional values for the command.

    Raises:
        ZeusBSOConfigError: The command contains a name without a value, or lacks ``{batch_size}``; or a value is out of
            range.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # rejects unknown keys of the file

    name: str
    dataset: str
    network: str
    optimizer: str
    target_metric: float
    max_epochs: PositiveInt
    default_bs: BatchSize
    default_lr: float
    command: str | Sequence[str]
    workdir: str | Path | None = None
    lr_scaling: LrScaling | str = LrScaling.AUTO
    higher_is_better_metric: bool = True
    fields: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.match(ID_PATTERN, self.name):
            raise ZeusBSOConfigError(
                f"the job's name {self.name!r} becomes a part of file names: use letters, digits and . _ : @ - only"
            )
        for name, value in (("max_epochs", self.max_epochs), ("default_lr", self.default_lr)):
            if not value > 0:
                raise ZeusBSOConfigError(f"job {self.name}: {name} is {value!r} and must be above 0")
        lr_factor(self.lr_scaling, self.default_bs, self.default_bs)
        given = _RUN_FIELDS | set(self._values)
        shadowing = sorted(given & set(self.fields))
        if shadowing:
            raise ZeusBSOConfigError(f"job {self.name}: fields {shadowing} have their values already: rename them")
        used = set().union(*(_fields_of(part) for part in self._parts))
        missing = sorted(used - given - set(self.fields))
        if missing:
            named = ", ".join(f"{{{name}}}" for name in missing)
            raise ZeusBSOConfigError(
                f"job {self.name}: the command holds {named}, which has no value: add it to the job's fields, or "
                "double the braces if they are meant literally"
            )
        if "batch_size" not in used:
            raise ZeusBSOConfigError(
                f"job {self.name}: the command lacks {{batch_size}}: the script must take its batch size from there"
            )

    def learning_rate(self, batch_size: int) -> float:
        """Return the learning rate at a batch size.

        Raises:
            ZeusBSOConfigError: The batch size is not positive.
        """
        return self.default_lr * lr_factor(self.lr_scaling, batch_size, self.default_bs, self.optimizer)

    def command_line(self, batch_size: int, learning_rate: float, seed: int) -> list[str]:
        """Return program and arguments of one run."""
        values = {"batch_size": batch_size, "learning_rate": learning_rate, "seed": seed, **self._values, **self.fields}
        return [part.format_map(values) for part in self._parts]

    @property
    def _values(self) -> dict[str, object]:
        """Values of the command that all runs share, without `fields`."""
        named = {name: getattr(self, name) for name in ("name", "dataset", "network", "optimizer", "target_metric")}
        return {**named, "epochs": self.max_epochs, "python": sys.executable}

    @property
    def _parts(self) -> list[str]:
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)


def _fields_of(template: str) -> set[str]:
    """Return the names in a format string, without attributes and indices."""
    try:
        found = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ZeusBSOConfigError(f"the command's part {template!r} cannot be filled in: {error}") from None
    return {re.split(r"[.\[]", name)[0] for name in found}


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MasterTable(_Table):
    """``[master]``: arguments of `ZeusMaster` and its `run`; a command-line option may override `recurrences`."""

    batch_sizes: Annotated[list[BatchSize], Field(min_length=1)]
    recurrences: PositiveInt = 10
    eta_knob: Annotated[float, Field(ge=0, le=1)] = 0.5
    beta_knob: Annotated[float, Field(gt=0)] | None = 2.0
    seed: Seed = 123456
    profile_warmup_iters: int = 10
    profile_measure_iters: int = 40

    @field_validator("beta_knob")
    @classmethod
    def _infinite_is_none(cls, beta_knob: float | None) -> float | None:
        return None if beta_knob is None or math.isinf(beta_knob) else beta_knob


class OptimizerTable(_Table):
    """``[optimizer]``: the batch size optimization server.

    `server_url` defaults to ``ZEUS_SERVER_URL``, or to a server in the master's process. The options are fields of
    `JobSpec`.
    """

    kind: Literal["server"] = "server"
    server_url: str | None = None
    options: dict[str, Any] = {}  # pydantic copies defaults


class MasterConfig(_Table):
    """The whole file.

    ``[job]`` has the fields of `Job`, with `workdir` relative to the file, and ``[job.fields]`` has additional values
    for the command. ``[gpus]`` has the fields of `GpuConfig`, if the script runs on other devices than this machine's.
    """

    job: Job
    master: MasterTable
    optimizer: OptimizerTable = OptimizerTable()
    gpus: GpuConfig | None = None


def read_config(path: Path) -> tuple[MasterConfig, Job]:
    """Read the file, and return it with its job; raise `ZeusBSOConfigError` if its content is invalid."""
    try:
        config = MasterConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ZeusBSOConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ZeusBSOConfigError(f"{path} is no TOML: {error}") from None
    except ValidationError as error:
        raise ZeusBSOConfigError(f"{path}: {faults_in_words(error)}") from None
    return config, replace(config.job, workdir=path.absolute().parent / (config.job.workdir or ""))
