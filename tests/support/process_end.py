"""The end of a process that has trained with others."""

from __future__ import annotations

import os
import sys

import torch.distributed


def leave() -> None:
    """End this process and its part in the group, without what the interpreter and torch do at their end.

    The Trainer leaves the group open. Now and then a process of torch 2.13 with gloo then ends by ``terminate called
    without an active exception``, also when the group is destroyed first: after all Python code, in no Python thread.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
