"""The time and energy of a training's steps under each power limit, and the file for these measurements."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, ValidationError

from zeus_plugins.files import state_directory
from zeus_plugins.protocol import BatchSize, GpuConfig, Joules, PositiveInt, Seconds, Text, Watts, WireMessage
from zeus_plugins.train_result import write_atomically

# Leaves room for the rest of the file's name.
_NAME_LENGTH = 80

_logger = logging.getLogger("zeus_plugins")


class PowerLimitSample(WireMessage):
    """One measurement window under one power limit.

    Attributes:
        limit_w: The power limit of each GPU, watts.
        steps: Number of steps measured.
        time_s: Their duration, seconds.
        energy_j: Their energy over all GPUs, joules.
        source: How the energy was measured, as in `zeus_plugins.energy.Measurement.source`.
    """

    limit_w: Watts
    steps: PositiveInt
    time_s: Seconds
    energy_j: Joules
    source: Text = ""

    @property
    def time_per_step_s(self) -> float:
        """Seconds of one step."""
        return self.time_s / self.steps

    @property
    def energy_per_step_j(self) -> float:
        """Joules of one step, over all GPUs."""
        return self.energy_j / self.steps


def _ascending(samples: tuple[PowerLimitSample, ...]) -> tuple[PowerLimitSample, ...]:
    """Order samples by their limit, and refuse two samples of the same limit."""
    by_limit = {each.limit_w: each for each in samples}
    if len(by_limit) < len(samples):
        raise ValueError("two entries have the same limit_w")
    return tuple(by_limit[limit_w] for limit_w in sorted(by_limit))


class PowerLimitProfile(WireMessage):
    """The cost of a training's steps under each power limit, at one batch size on one kind of machine.

    Until the profiling ends, samples of some limits are missing.

    Attributes:
        gpus: The measured devices, with the sum of their maximum power, watts.
        batch_size: Global batch size, or None if unknown.
        samples: One sample for each power limit. Kept ascending by limit.
    """

    gpus: GpuConfig
    batch_size: BatchSize | None = None
    samples: Annotated[tuple[PowerLimitSample, ...], AfterValidator(_ascending)] = ()

    @property
    def limits_w(self) -> tuple[float, ...]:
        """The measured power limits of each GPU in watts, ascending."""
        return tuple(sample.limit_w for sample in self.samples)

    def with_sample(self, sample: PowerLimitSample) -> Self:
        """Return this profile with `sample` in place of any sample of its limit."""
        samples = [*(each for each in self.samples if each.limit_w != sample.limit_w), sample]
        return self.model_copy(update={"samples": tuple(sorted(samples, key=lambda each: each.limit_w))})

    def only(self, limits_w: Iterable[float]) -> Self:
        """Return this profile with only the samples of these limits."""
        wanted = set(limits_w)
        return self.model_copy(update={"samples": tuple(each for each in self.samples if each.limit_w in wanted)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, atomically; log a warning if it cannot be written."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), self.model_dump_json(indent=2) + "\n")
        except OSError as error:
            _logger.warning("the power-limit profile could not be saved: %s", error)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self | None:
        """Read a file of `save`; return None if the file is absent or, with a warning, if it is not a valid profile."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.warning("the power limits are measured again: %s", error)
        except ValidationError as error:
            found = f"{error.error_count()} errors, the first: {error.errors()[0]['msg']}"
            _logger.warning("the power limits are measured again: %s holds no power-limit profile (%s)", path, found)
        return None


def profile_path_of(job_id: str, batch_size: int) -> Path:
    """Return the file in the state directory for the measurements of a job at this batch size."""
    digest = hashlib.sha256(job_id.encode()).hexdigest()[:16]
    return state_directory() / "power-profiles" / f"{job_id[:_NAME_LENGTH]}-{digest}-{batch_size}.json"
