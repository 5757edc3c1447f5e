"""Scripts in the style of the frameworks' guides, none of them adapted to the callbacks.

Each script in `tests/guides/` runs with one added line, which gives its trainer the callback. The batches are counted
where the script's own code trains on them, without any hook in the script.
"""

from __future__ import annotations

import functools
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("transformers", reason="the Trainer's callback needs zeus-plugins[transformers]")

import torch
from lightning.pytorch import LightningModule
from transformers import Trainer

from tests.support import ROOT
from tests.support.job_bench import SERVERS_SIZE, JobBench
from tests.support.lightning_bench import QUIET
from tests.support.servers import ServerProcess
from zeus_plugins.huggingface import ZeusBSOTrainerCallback
from zeus_plugins.lightning import ZeusBSOCallback
from zeus_plugins.protocol import TrialState

GUIDES = ROOT / "tests" / "guides"

pytestmark = [
    *QUIET,
    # Remarks of both frameworks on scripts with default settings.
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed as a dependency:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning"),
]


@dataclass(frozen=True)
class Script:
    """A script, and the `line` that gives its trainer the callback, inserted `before` another line.

    `sizes` are the sizes of all batches of two epochs.
    """

    script: str
    before: str
    line: str
    sizes: list[int]

    def source_with_callback(self) -> str:
        source = (GUIDES / self.script).read_text()
        assert source.count(f"\n{self.before}\n") == 1
        return source.replace(f"\n{self.before}\n", f"\n{self.line}\n{self.before}\n")


SCRIPTS = [
    Script(
        "lightning_gan.py",
        before='    accelerator="auto",',
        line='    callbacks=[ZeusBSOCallback(job, monitor="d_loss", lr_scaling="sqrt", on_failure="stop")],',
        sizes=([48] * 31 + [12]) * 2,
    ),
    Script(
        "huggingface_custom_loss.py",
        before="trainer.train()",
        line='ZeusBSOTrainerCallback(job, "eval_loss", lr_scaling="sqrt", on_failure="stop").attach(trainer)',
        sizes=[12] * 120 * 2,
    ),
]


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, because the scripts write into it, with one thread, because the networks are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning uses deprecated parts of jsonargparse
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="sizes")
def counted_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches on which a script's training step, or its model in training, is called."""
    sizes: list[int] = []

    def wrap_training_step(cls: Any) -> None:
        if "training_step" not in vars(cls):
            return
        step = cls.training_step

        @functools.wraps(step)
        def counted(module: LightningModule, batch: Any, *args: Any) -> Any:
            sizes.append(len(batch[0]))
            return step(module, batch, *args)

        cls.training_step = counted

    def note(model: torch.nn.Module, _: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        if model.training:
            sizes.append(len(next(iter(inputs.values()))))

    construct = Trainer.__init__

    def construct_and_watch(trainer: Any, *args: Any, **kwargs: Any) -> None:
        construct(trainer, *args, **kwargs)
        trainer.model.register_forward_pre_hook(note, with_kwargs=True)

    monkeypatch.setattr(LightningModule, "__init_subclass__", classmethod(wrap_training_step))
    monkeypatch.setattr(Trainer, "__init__", construct_and_watch)
    return sizes


@pytest.mark.parametrize("guide", SCRIPTS, ids=lambda guide: guide.script[:-3])
def test_script_with_an_added_line_trains_at_the_servers_size(
    shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, sizes: list[int], guide: Script
) -> None:
    bench = JobBench(shared_server, f"digits-{uuid.uuid4().hex}")
    job = bench.job(target=-1.0, higher_is_better_metric=False, max_epochs=2)  # no loss is negative
    monkeypatch.setenv("ZEUS_SERVER_URL", shared_server.url)
    names = {"job": job, "ZeusBSOCallback": ZeusBSOCallback, "ZeusBSOTrainerCallback": ZeusBSOTrainerCallback}
    # As ``python script`` runs it.
    code = compile(guide.source_with_callback(), GUIDES / guide.script, "exec")
    exec(code, {"__name__": "__main__", **names})  # noqa: S102 - our own scripts
    assert sizes == guide.sizes
    trial = bench.only_trial()
    assert (trial.batch_size, trial.state, trial.epochs) == (SERVERS_SIZE, TrialState.EXHAUSTED, 2)
    assert trial.metric is not None
