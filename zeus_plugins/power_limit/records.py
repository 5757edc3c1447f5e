"""Limits that trainings have changed, kept in files, so that one that was left behind is known for what it is.

A record is written before a limit is changed, and removed when it was put back. Who finds one whose limit is still in
force knows the limit that was there before; any other limit was set by somebody else since, and counts as it is.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from zeus_plugins.client.outbox import state_directory
from zeus_plugins.power_limit.devices import TOLERANCE_W
from zeus_plugins.train_result import write_atomically
from zeus_plugins.training.placement import BOOT_ID

_logger = logging.getLogger("zeus_plugins")


@dataclass(frozen=True)
class LimitRecord:
    """One GPU's limit before a training, and the one that the training has set last; watts.

    Attributes:
        boot_id: The start of the machine in which it was set: none survives that.
    """

    original_w: float
    set_w: float
    boot_id: str

    def holds(self, in_force_w: float) -> bool:
        """True when the limit in force is the one that the training has set."""
        return self.boot_id == _boot_id() and abs(in_force_w - self.set_w) <= TOLERANCE_W


def remember(uuid: str | None, original_w: float, set_w: float) -> None:
    """Keep a GPU's limit before a training, and the one that is about to be set; watts. It never raises."""
    path = _path(uuid)
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(LimitRecord(original_w, set_w, _boot_id()))) + "\n")
    except OSError as error:
        _logger.debug("the power limit to come back to could not be kept in a file: %s", error)


def recall(uuid: str | None) -> LimitRecord | None:
    """The record of a GPU's limit; None where there is none that can be read."""
    path = _path(uuid)
    try:
        return None if path is None else LimitRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def forget(uuid: str | None) -> None:
    """Remove the record of a GPU's limit, which was put back. It never raises."""
    path = _path(uuid)
    try:
        if path is not None:
            path.unlink(missing_ok=True)
    except OSError as error:
        _logger.debug("the record of a power limit could not be removed: %s", error)


def _path(uuid: str | None) -> Path | None:
    if not uuid:
        return None
    return state_directory() / "power-limits" / f"{re.sub('[^0-9A-Za-z-]', '_', uuid)}.json"


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # other systems than Linux
        return ""
