"""End of a process that trained in a group."""

from __future__ import annotations

import os
import sys

import torch.distributed


def leave() -> None:
    """End this process and its group membership, without the final steps of the interpreter and torch.

    The Trainer leaves the group open. Occasionally, a process of torch 2.13 with gloo then ends by ``terminate called
    without an active exception``, also when the group is destroyed first: after all Python code, in no Python thread.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
