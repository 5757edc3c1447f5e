"""The examples run as for a reader."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, warm
from tests.support.servers import ServerProcess
from zeus_plugins.client.http import BsoClient
from zeus_plugins.protocol import TrialState
from zeus_plugins.training.startup import FirstSteps

EXAMPLES = ROOT / "examples"
MEASURED = {TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "job_id", "arguments", "trainings"),
    [
        ("lightning_digits.py", "digits-1", ["--recurrences", "1"], 1),
        ("lightning_digits.py", "digits-1", ["--devices", "2"], 1),
        ("plain_pytorch.py", "digits-1", ["--recurrences", "2"], 2),
        ("hf_sentiment.py", "sentiment-1", ["--target", "0"], 1),
        ("hf_digits.py", "digits-1", ["--recurrences", "1", "--devices", "2"], 1),
        ("plain_ddp.py", "digits-1", ["--recurrences", "1"], 1),
        ("accelerate_digits.py", "digits-1", ["--recurrences", "2"], 2),
        ("fabric_digits.py", "digits-1", ["--recurrences", "1", "--devices", "2"], 1),
    ],
    ids=[
        *("lightning", "lightning on two processes, no server URL", "plain, no server URL", "sentiment"),
        *("hugging face on two processes, no server URL", "plain on two processes", "accelerate"),
        "fabric on two processes",
    ],
)
def test_example_trains_the_requested_number_of_times(
    server: ServerProcess,
    script: str,
    job_id: str,
    arguments: list[str],
    trainings: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if request.node.callspec.id.endswith("no server URL"):
        monkeypatch.delenv("ZEUS_SERVER_URL", raising=False)
        monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", server.database_url)
        where = []
    else:
        where = ["--server-url", server.url]
    output = run_example(script, *arguments, *where, "--job-id", job_id)
    with BsoClient(server.url) as client:
        trials = client.show_job(job_id).trials
    assert len(trials) == trainings
    assert trials[0].batch_size == 64
    assert {trial.state for trial in trials} <= MEASURED
    assert "batch size 64" in output


def run_example(script: str, *arguments: str) -> str:
    """Run an example to its end, without an error, in a process that has imported what most examples import.

    Returns:
        Its output.
    """
    modules: Sequence[str] = warm.LIGHTNING
    if script.startswith(("hf_", "accelerate_")):
        if not os.environ.get("CI"):
            pytest.importorskip("transformers", reason="the example needs zeus-plugins[transformers]")
        modules = warm.TRANSFORMERS
    run = warm.run("tests.support.script", str(EXAMPLES / script), *arguments, modules=modules)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_changed_sentiment_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Let each batch take a millisecond, and each word 200 ns more, so that the machine's speed has no effect."""
    import torch

    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("sentiment_drift")
    now_s = [0.0]

    def pass_time(module: torch.nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
        if isinstance(module, torch.nn.EmbeddingBag):
            now_s[0] += 0.001 + 2e-7 * inputs[0].numel()

    monkeypatch.setattr("time.process_time", lambda: now_s[0])
    monkeypatch.setattr("zeus_plugins.training.session.FirstSteps", lambda: FirstSteps(lambda: now_s[0]))
    monkeypatch.setattr(sys, "argv", ["sentiment_drift.py", "--recurrences", "28", "--change", "14"])
    threads, hook = torch.get_num_threads(), torch.nn.modules.module.register_module_forward_hook(pass_time)
    try:
        example.main()
    finally:
        hook.remove()
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    sizes = [int(line.split(": ")[1].split(",")[0]) for line in lines if line.startswith("slice ")]
    assert len(sizes) == 28
    # For short posts, 512 and 1024 are the cheapest; for long reviews, 1024 costs more than twice as much as 128.
    assert max(sizes[5:13]) >= 512
    assert max(sizes[-5:]) < 512


# Slices in files

ROWS = [{"text": "what a lovely day :)", "label": 1}, {"text": "awful traffic again", "label": 0, "user": "someone"}]
LINES = "\n".join(json.dumps(row) for row in ROWS) + "\n"
LIST = json.dumps(ROWS, indent=2)


def write_slice(folder: Path, number: int, train: str, validation: str) -> None:
    (folder / f"{number}_train.json").write_text(train)
    (folder / f"{number}_val.json").write_text(validation)


@pytest.mark.slow
def test_recurrence_trains_on_a_slice_of_a_folder(server: ServerProcess, tmp_path: Path) -> None:
    write_slice(tmp_path, 1, LINES * 100, LINES)
    write_slice(tmp_path, 2, LINES * 100, LIST)
    options = ["--recurrences", "1", "--target", "0", "--server-url", server.url, "--job-id", "sentiment-1"]
    output = run_example("hf_sentiment.py", "--data", str(tmp_path), "--slice", "2", *options)
    assert [line.split()[3] for line in output.splitlines() if line.startswith("training on")] == ["2"]
    with BsoClient(server.url) as client:
        assert [trial.state for trial in client.show_job("sentiment-1").trials] == [TrialState.COMPLETED]
