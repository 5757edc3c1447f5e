"""Threads of this process that send heartbeats."""

from __future__ import annotations

import threading

HEARTBEATS = "zeus-bso-heartbeat"


def heartbeat_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == HEARTBEATS]
