"""What a training costs under each power limit, and how that is kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import GpuConfig

__all__ = ["PowerLimitProfile", "PowerLimitSample"]

Watts = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Record(BaseModel):
    """Immutable, and deaf to fields that a later version has added."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class PowerLimitSample(_Record):
    """One measurement window under one power limit.

    Attributes:
        limit_w: The power limit of each GPU, watts.
        steps: Steps measured.
        time_s: Their duration, seconds.
        energy_j: Their energy over all GPUs, joules.
        source: How the energy was obtained, as `Measurement.source`.
    """

    limit_w: Watts
    steps: Annotated[int, Field(gt=0)]
    time_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    energy_j: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    source: str = ""

    @property
    def time_per_step_s(self) -> float:
        """Seconds of one step."""
        return self.time_s / self.steps

    @property
    def energy_per_step_j(self) -> float:
        """Joules of one step, over all GPUs."""
        return self.energy_j / self.steps

    @property
    def average_power_w(self) -> float:
        """Mean power over all GPUs, watts."""
        return self.energy_j / self.time_s


class PowerLimitProfile(_Record):
    """The power-limit profile of a training at one batch size on one kind of machine.

    Attributes:
        gpus: The devices measured; their maximum power is summed over them, watts.
        batch_size: Global batch size, or None when nobody said.
        samples: One for each power limit, ascending by limit. Fewer than all of them while the profiling goes on.
    """

    gpus: GpuConfig
    batch_size: Annotated[int, Field(gt=0)] | None = None
    samples: tuple[PowerLimitSample, ...] = ()

    @field_validator("samples")
    @classmethod
    def _one_for_each_limit(cls, samples: tuple[PowerLimitSample, ...]) -> tuple[PowerLimitSample, ...]:
        by_limit = {sample.limit_w: sample for sample in samples}
        if len(by_limit) < len(samples):
            raise ValueError("two samples have the same limit_w")
        return tuple(by_limit[limit_w] for limit_w in sorted(by_limit))

    @property
    def limits_w(self) -> tuple[float, ...]:
        """The power limits measured, ascending, watts of each GPU."""
        return tuple(sample.limit_w for sample in self.samples)

    def with_sample(self, sample: PowerLimitSample) -> Self:
        """This profile with a sample more; an earlier one of the same limit gives way."""
        others = [each for each in self.samples if each.limit_w != sample.limit_w]
        return self._with([*others, sample])

    def only(self, limits_w: Iterable[float]) -> Self:
        """This profile without the samples of other limits."""
        wanted = set(limits_w)
        return self._with(sample for sample in self.samples if sample.limit_w in wanted)

    def fits(self, gpus: GpuConfig, batch_size: int | None) -> bool:
        """Whether it says something about a training on these devices at this batch size."""
        return self.gpus == gpus and self.batch_size == batch_size

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all: who reads meanwhile sees the old file or the new one.

        Raises:
            OSError: It cannot be written.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.model_dump_json(indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            ZeusBSOConfigError: The file holds no profile.
            OSError: It cannot be read.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            raise ZeusBSOConfigError(
                f"{os.fspath(path)} holds no power-limit profile ({error.error_count()} errors, the first: "
                f"{error.errors()[0]['msg']}): delete it to have the limits measured anew"
            ) from error

    def _with(self, samples: Iterable[PowerLimitSample]) -> Self:
        in_order = tuple(sorted(samples, key=lambda sample: sample.limit_w))
        return self.model_copy(update={"samples": in_order})
