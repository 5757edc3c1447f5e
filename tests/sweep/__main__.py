"""Train all combinations on this rank, and write down each outcome.

Usage: ``python -m tests.sweep [FOLDER]``; with ``WORLD_SIZE`` and related variables set, as one of several ranks.
Without a folder, print a table of the outcomes of one process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from tests.sweep.cases import cases, outcome_of
from tests.sweep.verdict import verdict_of


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "zeus_plugins", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    found = [(asdict(case), asdict(outcome_of(case, folder))) for case in cases(world_size)]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
            for case, outcome in json.loads(Path(name, "rank0.json").read_text()):
                print(" | ".join((*case.values(), verdict_of([outcome]))))
