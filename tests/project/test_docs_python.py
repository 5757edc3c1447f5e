"""The Python of the documentation runs, each page from top to bottom as a reader would type it.

A block that cannot run is skipped by a comment before it, which a reader does not see and which says why:
``<!-- skip: next "the reason" -->``.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import SkipTest

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from tests.support import ROOT
from tests.support.lightning_bench import QUIET

pytestmark = QUIET

RUN_ELSEWHERE = {
    "README.md": "tests/project/test_docs.py",
    "docs/policy.md": "tests/core/test_open_policies.py",
}
TRAININGS = {"docs/first-saving.md", "docs/tutorial-lightning.md", "docs/tutorial-huggingface.md"}


def lightning() -> dict[str, Any]:
    from lightning.pytorch import Trainer

    from zeus_plugins.lightning import ZeusBSOCallback

    return {"Trainer": Trainer, "ZeusBSOCallback": ZeusBSOCallback}


def hugging_face() -> dict[str, Any]:
    pytest.importorskip("transformers")
    from zeus_plugins.huggingface import ZeusBSOTrainerCallback

    return {"Trainer": lambda _, callbacks: callbacks, "ZeusBSOTrainerCallback": ZeusBSOTrainerCallback}


def schedules() -> dict[str, Any]:
    module = SimpleNamespace(learning_rate=0.1)
    return {"group": {}, "warm_up": 0.5, "self": module, "callback": SimpleNamespace(lr_factor=2.0)}


def data_loader() -> dict[str, Any]:
    import torch
    from torch.utils.data import TensorDataset

    from zeus_plugins.dataloader import ZeusDataLoader

    data = TensorDataset(torch.zeros(8, 1))
    return {"ZeusDataLoader": ZeusDataLoader, "train_set": data, "eval_set": data, "batch_size": 4, "epochs": 2} | {
        "accuracy": 1.0
    }


def registered_job() -> dict[str, Any]:
    from zeus_plugins import JobSpec
    from zeus_plugins.client import client_from_environment
    from zeus_plugins.protocol import GpuConfig, JobSpecFromClient

    name = "resnet50-cifar100"
    spec = JobSpec(job_id=name, job_id_prefix=name, batch_sizes=(128, 256), default_batch_size=128)
    gpus = GpuConfig(max_power=300.0, number_of_gpus=1, gpu_model="A100")
    with client_from_environment() as client:
        client.register(JobSpecFromClient.of(spec, gpus))
    return {}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/lightning.md": lightning,
    "docs/huggingface.md": hugging_face,
    "docs/schedules.md": schedules,
    "docs/master.md": data_loader,
    "docs/dashboard.md": registered_job,
}
"""The names that a page takes as known, and what it takes to be on the server, by page."""


def pages_with_python() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages if "```python\n" in page.read_text()]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page in TRAININGS else page
        for page in pages_with_python()
        if page not in RUN_ELSEWHERE
    ],
)
@pytest.mark.filterwarnings("ignore:No energy counter found:UserWarning")
# The examples leave all settings of the trainer as they are, and TensorBoard may be absent.
@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed:UserWarning")
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZEUS_SERVER_URL", raising=False)
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")
    monkeypatch.setenv("ZEUS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("ZEUS_TARGET_METRIC", "0.9")
    document = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], path=str(ROOT)).parse(ROOT / page)
    document.namespace.update(GIVEN.get(page, dict)())
    examples = list(document.examples())
    assert examples
    for example in examples:
        with contextlib.suppress(SkipTest):  # of this block alone
            example.evaluate()
    tests = [shown for name, shown in document.namespace.items() if name.startswith("test_")]
    assert bool(tests) == (page == "docs/testing.md")
    for test in tests:
        test(*([tmp_path] if inspect.signature(test).parameters else []))


def test_each_skipped_block_says_why() -> None:
    marks = [mark for page in pages_with_python() for mark in re.findall("<!-- *skip:.*", (ROOT / page).read_text())]
    assert [mark for mark in marks if not re.fullmatch(r'<!-- skip: next "[^"]{10,}" -->', mark)] == []


def test_what_runs_elsewhere_is_run_there() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()
