"""The documentation is true: links, commands, tables of fields and arguments, and the examples in Python.

Each page's Python runs from top to bottom as a reader would type it. A block that cannot run is skipped by a comment
before it, invisible to readers, with the reason: ``<!-- skip: next "the reason" -->``.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import SkipTest

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from docs import generated
from release.__main__ import PROJECT, USERS_EXTRAS, VERSION
from tests.support import ROOT
from tests.support.artefacts import WORKFLOW_FILE
from tests.support.lightning_bench import QUIET
from zeus_plugins import JobSpec
from zeus_plugins.cli import energy
from zeus_plugins.errors import ZeusBSOTrainFailError
from zeus_plugins.protocol import EndReason, Origin, Stage, TrialState

pytestmark = QUIET

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), ROOT / "examples" / "README.md"]
REFERENCE = (DOCS / "reference.md").read_text()

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the names of the page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_targets(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize(("page", "least"), [("matrix.md", 50), ("internals.md", 50)])
def test_tests_named_on_a_page_exist(page: str, least: int) -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    text = "\n".join(file.read_text() for file in files)
    names = set(re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE))
    spans = INLINE.findall((DOCS / page).read_text())
    patterns = [span.replace("…", r"\w+") for span in spans if span.startswith("test_")]
    assert len(patterns) > least
    assert [pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in names)] == []
    assert [span for span in spans if span.startswith("tests/") and not (ROOT / span).exists()] == []


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 60


def commands() -> Iterator[tuple[str, bool]]:
    """Yield every command of this project in the documentation, and True if it can be typed without changes."""
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        text = page.read_text()
        for language, block in FENCED.findall(text):
            if language in {"sh", "bash"}:
                for line in block.replace("\\\n", " ").splitlines():
                    if found := re.search(r"(?:^|[\s/])((?:bso-server|zeus-plugins) [^#;>]*)", line):
                        yield found[1].strip(), not re.search(r"[\[|$<…]", found[1])
        for span in INLINE.findall(FENCED.sub("", text)):
            if re.match(r"(bso-server|zeus-plugins) ", span):
                yield span, False


@pytest.mark.parametrize(("command", "is_whole"), sorted(set(commands())))
def test_commands_can_be_typed_as_shown(command: str, is_whole: bool) -> None:
    name, *arguments = shlex.split(command)
    if "--" in arguments:
        arguments = [*arguments[: arguments.index("--")], "--", "true"]
    parser = generated.PARSERS[name]()
    if is_whole:
        parser.parse_args(arguments)
    options = re.findall(r"(?<!\S)\[?\|?(--[a-z][a-z-]*)", command) + re.findall(r"\|(--[a-z][a-z-]*)", command)
    words: list[str] = []
    for argument in arguments:
        if argument.startswith(("-", "[")) or "|" in argument:
            break
        words.append(argument)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        parser.parse_args([*words, "--help"])
    assert ended.value.code == 0
    assert [option for option in options if option not in shown.getvalue()] == []


def shell_lines() -> Iterator[tuple[str, str]]:
    """Yield each documented shell line with its page."""
    for page in PAGES:
        for language, block in FENCED.findall(page.read_text()):
            if language in {"sh", "bash"}:
                yield from ((page.name, line) for line in block.replace("\\\n", " ").splitlines())


def test_documented_targets_and_scripts_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    spans = [span for page in PAGES for span in INLINE.findall(FENCED.sub("", page.read_text()))]
    lines = [line.strip() for _, line in shell_lines()] + spans
    targets = {found[1] for line in lines if (found := re.match(r"make ([a-z.][a-z-]*)", line))}
    assert len(targets) > 5
    assert [target for target in targets if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)] == []
    scripts = [found for line in lines if (found := re.search(r"python (examples/\S+\.py)(.*)", line))]
    assert len(scripts) > 5
    for script in scripts:
        text = (ROOT / script[1]).read_text()
        assert [
            option for option in re.findall(r"--[a-z-]+", script[2].split("#")[0]) if f'"{option}"' not in text
        ] == []


@pytest.mark.parametrize("page", sorted({page for page, _ in shell_lines()}))
def test_shell_blocks_of_a_page_parse(page: str) -> None:
    text = "\n".join(line for name, line in shell_lines() if name == page)
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)  # noqa: S607 - any bash will do
    assert checked.stderr == ""


def table_below(heading: str, text: str = REFERENCE) -> list[tuple[str, str]]:
    """Return the first two cells of each row, without back-ticks, of the table below a heading with this beginning."""
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = [one for one in section if one.startswith(heading)]
    rows = [line.split("|")[1:3] for line in found.splitlines() if line.startswith("| `")]
    return [(name.strip().strip("`"), default.strip().strip("`").replace('"', "'")) for name, default in rows]


def test_reference_lists_the_fields_of_a_job() -> None:
    fields = JobSpec.model_fields.items()
    defaults = [(name, "required" if field.is_required() else field.get_default()) for name, field in fields]
    assert table_below("`zeus_plugins.JobSpec`") == [
        (name, default if default == "required" else repr(getattr(default, "value", default)))
        for name, default in defaults
    ]


@pytest.mark.parametrize(("package", "needed"), [("lightning", "lightning"), ("huggingface", "transformers")])
@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("`zeus_plugins.lightning.ZeusBSOCallback`", "BatchSizeCallback"),
        ("`ZeusEnergyCallback`", "EnergyCallback"),
        ("`ZeusPowerLimitCallback`", "PowerLimitCallback"),
    ],
)
def test_reference_lists_the_arguments_of_the_callbacks(package: str, needed: str, heading: str, name: str) -> None:
    pytest.importorskip(needed)
    module = __import__(f"zeus_plugins.{package}", fromlist=[name])
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert table_below(heading) == [
        (one.name, "required" if one.default is one.empty else repr(one.default))
        for one in parameters
        if one.kind is not one.VAR_KEYWORD  # collects wrong names for a helpful error
    ]


def test_pages_install_from_a_wheel_or_from_source_and_link_to_the_one_section() -> None:
    section = DOCS / "installation.md"
    for page in [page for page in PAGES if page.name not in {"CHANGELOG.md", section.name}]:
        text = page.read_text()
        # Until an index has the package, pip finds no such name.
        assert not re.search(r"pip install[^`\n]*\n?\s*'?zeus-plugins", text), page.name
        if "pip install '.[" in text and page.name not in {"CONTRIBUTING.md", "policy-figures.md"}:
            assert f"{section.name})" in text, page.name
    wheel = f"{PROJECT['urls']['Homepage']}/releases/download/v{VERSION}/zeus_plugins-{VERSION}-py3-none-any.whl"
    for file in (section, WORKFLOW_FILE):
        assert re.findall(r"@ (https://[^\s']+)", file.read_text())[-1] == wheel
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section.read_text(), re.MULTILINE)))
    assert sorted(listed) == sorted(USERS_EXTRAS)


@pytest.mark.parametrize("page", generated.PAGES)
def test_generated_pages_match_the_code(page: str) -> None:
    assert (DOCS / page).read_text() == generated.PAGES[page](), "make reference writes it anew"


@pytest.mark.parametrize(
    ("heading", "values"),
    [("States of a trial", TrialState), ("Reasons of", EndReason), ("Origins of", Origin), ("Stages of", Stage)],
)
def test_reference_lists_every_state(heading: str, values: type[StrEnum]) -> None:
    (section,) = [one for one in REFERENCE.split("\n## ") if one.startswith(heading)]
    named = [line.split("|")[1].strip(" `") for line in section.splitlines() if line.startswith("| ")]
    assert sorted(named[1:]) == sorted(values)


def test_exit_statuses_of_the_reference_match_the_code() -> None:
    code = "\n".join(
        path.read_text() for name in ("zeus_plugins", "bso_server") for path in (ROOT / name / "cli").glob("*.py")
    )
    own = (energy._FAILED, energy._NOT_EXECUTABLE, energy._NOT_FOUND, ZeusBSOTrainFailError.exit_status)
    statuses = {"2", *re.findall(r"return (\d+)$", code, re.MULTILINE), *map(str, own)}
    section = REFERENCE.partition("\n## Exit statuses\n")[2]
    shown = {cell.strip() for line in section.splitlines() for cell in re.split(r"[|,]", line)}
    assert len(statuses) > 5
    assert sorted(statuses - shown) == []


def example(package: str) -> str:
    """Return the README's Python example that imports from this package."""
    (found,) = [
        code for language, code in FENCED.findall(README.read_text()) if language == "python" and package in code
    ]
    assert isinstance(found, str)
    return found


# The example keeps all default settings of the trainer.
@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval:UserWarning")
def test_lightning_example_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.lightning_bench import USERS_SIZE, AttributeData, Batch, Classifier
    from zeus_plugins.client import client_from_environment

    class Scoring(Classifier):
        def validation_step(self, batch: Batch) -> None:  # noqa: ARG002 - Lightning's signature
            self.log("val_acc", 1.0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZEUS_SERVER_URL", raising=False)
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")
    names: dict[str, Any] = {"model": Scoring(), "datamodule": AttributeData()}
    code = example("zeus_plugins.lightning")
    assert len([line for line in code.splitlines() if line]) <= 12
    exec(code, names)  # noqa: S102 - our own README
    with client_from_environment() as client:
        (job,) = client.list_jobs().jobs
        view = client.show_job(job.job_id)
    (trial,) = view.trials
    assert (trial.state, trial.batch_size) == ("completed", USERS_SIZE)
    assert (view.job.batch_sizes, view.job.max_epochs) == ((2, 4, 8, 16, 32, 64, 128), 100)
    assert names["model"].seen_sizes[0] == USERS_SIZE


# --- Python of the pages ----------------------------------------------------------------------------------------------


RUN_ELSEWHERE = {
    "README.md": "tests/project/test_docs.py",
    "docs/policy-custom.md": "tests/core/test_open_policies.py",
}
TRAININGS = {"docs/first-saving.md", "docs/lightning.md", "docs/huggingface.md"}


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
# The examples keep all default settings of the trainer, and TensorBoard may be absent.
@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed:UserWarning")
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with contextlib.suppress(SkipTest):  # of this block only
            example.evaluate()
    assert page not in TRAININGS or document.namespace["zeus"].converged
    tests = [shown for name, shown in document.namespace.items() if name.startswith("test_")]
    assert bool(tests) == (page == "docs/examples.md")
    for test in tests:
        test(*([tmp_path] if inspect.signature(test).parameters else []))


def test_each_skipped_block_states_the_reason() -> None:
    marks = [mark for page in pages_with_python() for mark in re.findall("<!-- *skip:.*", (ROOT / page).read_text())]
    assert [mark for mark in marks if not re.fullmatch(r'<!-- skip: next "[^"]{10,}" -->', mark)] == []


def test_skipped_block_is_run_by_the_named_test() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()
