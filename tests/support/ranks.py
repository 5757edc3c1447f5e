"""The processes of one distributed training, as ``torchrun`` starts and ends them, but much faster.

Other tests start ``torchrun`` and other launchers themselves.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.servers import free_port

POLL_S = 0.02
# Longer than a process needs to end after a signal.
GRACE_S = 30.0


def run_ranks(
    *command: str,
    modules: Sequence[str],
    output: Path,
    nodes: int = 1,
    environ: Mapping[str, str] | None = None,
) -> list[int]:
    """Run ``python -m`` with a module's name and its arguments on two ranks, to the end of both.

    As with ``torchrun``, a failing rank terminates the other.

    Args:
        command: The module and the arguments.
        modules: Modules to import beforehand.
        output: The file for the output of both ranks.
        nodes: The number of nodes that this machine simulates: 1 or 2.
        environ: Variables in addition to the environment of the tests.

    Returns:
        The exit status of each rank.

    Raises:
        AssertionError: A rank has not ended in time.
    """
    common = {
        **os.environ,
        **(environ or {}),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": str(2 // nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(2):
        node = rank if nodes == 2 else 0
        own = {"RANK": rank, "LOCAL_RANK": rank - node, "GROUP_RANK": node, "NODE_RANK": node}
        own_environ = common | {name: str(number) for name, number in own.items()}
        ranks.append(warm.start(*command, modules=modules, output=output, environ=own_environ))
    deadline = time.monotonic() + warm.LIMIT_S
    try:
        while None in (ended := [each.poll() for each in ranks]):
            if any(ended):
                for process in ranks:
                    process.terminate()
                return [each.wait(GRACE_S) for each in ranks]
            assert time.monotonic() < deadline, f"the processes hang: {output.read_text()}"
            time.sleep(POLL_S)
        return [each.wait() for each in ranks]
    finally:
        for process in ranks:
            process.kill()


def stories_of(module: str, folder: Path, *arguments: str, modules: Sequence[str]) -> list[dict[str, Any]]:
    """Run a module on two ranks, and return the contents of the file that each rank wrote."""
    status = run_ranks(module, str(folder), *arguments, modules=modules, output=folder / "output")
    assert status == [0, 0], (folder / "output").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
