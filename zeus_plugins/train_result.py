"""The result file that a training script leaves for its master, named as in Zeus.

`zeus_plugins.master` reads the file. The script writes it, for instance by `zeus_plugins.dataloader`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import Finite, Joules, NonNegativeFinite, NonNegativeInt, Seconds, WireMessage

__all__ = ["TrainResult", "result_path", "write_atomically"]


class TrainResult(WireMessage):
    """Result of one run of the script: the content of ``{job id}+bs{batch size}.train.json``.

    Attributes:
        energy: Joules over all GPUs.
        time: Seconds.
        cost: ``η·energy + (1 − η)·max_power·time`` in joules, computed by the script.
        num_epochs: Largest number of epochs.
        reached: Whether the target metric was reached.
        end_epoch: Epochs trained.
        metric: Last validation metric, or None.
        power_limit_w: Power limit of each GPU by which the run was accounted, watts; None if no limit was chosen.
        energy_source: Source of the energy measurement, or None.
    """

    energy: Joules
    time: Seconds
    cost: NonNegativeFinite
    num_epochs: NonNegativeInt
    reached: bool
    end_epoch: NonNegativeInt
    metric: Finite | None = None
    power_limit_w: NonNegativeFinite | None = None
    energy_source: str | None = None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a result; return None without a file, and raise `ZeusBSOConfigError` if the file holds no result."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            problem = f"{where}: {first['msg']}" if where else first["msg"]
            raise ZeusBSOConfigError(f"{path.name} holds no result of a training: {problem}") from None

    def write(self, path: Path) -> None:
        """Write the result atomically."""
        write_atomically(path, self.model_dump_json(indent=2, exclude_none=True) + "\n")


def result_path(log_dir: str | Path, job_id: str, batch_size: int) -> Path:
    """Return the path of a run's result file."""
    return Path(log_dir) / f"{job_id}+bs{batch_size}.train.json"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content; after a crash or power failure the file holds the old or the new content."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
