"""The time and energy of a training's steps under each power limit, and the file for these measurements."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from zeus_plugins.protocol import BatchSize, PowerLimitSample, PowerProfile
from zeus_plugins.train_result import write_atomically

_logger = logging.getLogger("zeus_plugins")


class PowerLimitProfile(PowerProfile):
    """The power-limit profile of a training at one batch size on one kind of machine.

    Until the profiling ends, samples of some limits are missing.

    Attributes:
        batch_size: Global batch size, or None if unknown.
    """

    batch_size: BatchSize | None = None

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
