"""``zeus-plugins doctor`` against real servers and simulated devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.answering import answering
from tests.support.energy_bench import plain_environment  # noqa: F401 - a fixture
from tests.support.fake_nvml import FakeGpu, FakeNvml, has_nvidia_driver
from tests.support.power_limit_bench import record_limit
from tests.support.servers import ServerProcess, bso_server, free_port
from tests.support.tokens import make_token
from zeus_plugins.cli import doctor, main
from zeus_plugins.energy.nvml import open_gpus
from zeus_plugins.energy.rapl import POWERCAP
from zeus_plugins.environment import VARIABLES

CHECKS = ["versions", "environment", "nvidia", "energy", "server", "outbox"]

measures_nothing = pytest.mark.skipif(has_nvidia_driver() or POWERCAP.exists(), reason="this machine measures energy")


@dataclass
class Report:
    """Findings of the doctor."""

    status: int
    findings: list[dict[str, Any]] = field(default_factory=list)

    def of(self, check: str) -> list[tuple[str, str]]:
        return [(each["level"], each["text"]) for each in self.findings if each["check"] == check]

    def only(self, check: str) -> tuple[str, str]:
        (finding,) = self.of(check)
        return finding


@pytest.fixture(name="ask")
def make_ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Return a function that runs the doctor with variables and, if given, a simulated NVIDIA driver."""
    # Without a server URL, the user's own file would be created.
    monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'bso.sqlite3'}")
    for name in ("ZEUS_SERVER_URL", "ZEUS_BSO_TOKEN", "ZEUS_JOB_ID"):
        monkeypatch.delenv(name, raising=False)

    def ask(*, nvml: FakeNvml | None = None, **environment: str) -> Report:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if nvml is not None:
            monkeypatch.setitem(sys.modules, "pynvml", nvml)
        status = main(["doctor", "--json"])
        told = json.loads(capsys.readouterr().out)
        assert told["usable"] is (status == 0)
        return Report(status, told["findings"])

    return ask


@measures_nothing
def test_machine_with_a_server_is_usable(ask: Any, shared_server: ServerProcess, state_directory: Path) -> None:
    report = ask(ZEUS_SERVER_URL=shared_server.url, ZEUS_JOB_ID="nightly")

    assert [finding["check"] for finding in report.findings] == CHECKS
    assert report.only("server") == ("ok", f"{shared_server.url} answers, and lets this client run trials")
    level, text = report.only("energy")
    assert (level, text.split(" × ")[0]) == ("warning", "estimate: 65 W assumed")
    assert report.only("outbox") == ("ok", f"{state_directory}/outbox: 0 waiting, 0 refused by a server")
    assert "ZEUS_JOB_ID=nightly" in report.only("environment")[1]
    versions = next(finding["details"] for finding in report.findings if finding["check"] == "versions")
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"zeus-plugins", "torch", "lightning", "transformers", "nvidia-ml-py"} <= set(versions)
    assert report.status == 0


def test_doctor_changes_nothing_on_the_server(ask: Any, server: ServerProcess) -> None:
    ask(ZEUS_SERVER_URL=server.url)
    listed = bso_server("jobs", "list", "--json", "--server-url", server.url)
    assert json.loads(listed.stdout)["jobs"] == []


def test_text_output_has_the_same_findings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_SERVER_URL", f"http://127.0.0.1:{free_port()}")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == CHECKS
    assert [line.split()[0] for line in lines if line.split()[1] == "server"] == ["problem"]


# --- Server ---------------------------------------------------------------------------------------------------------


def test_without_a_url_the_embedded_server_is_checked(ask: Any, tmp_path: Path) -> None:
    report = ask()
    url = f"embedded://{tmp_path / 'bso.sqlite3'}"
    assert report.only("server") == ("ok", f"{url} answers, and lets this client run trials")
    assert report.status == 0


def test_unreachable_server_is_a_problem_and_the_password_is_hidden(ask: Any) -> None:
    report = ask(ZEUS_SERVER_URL=f"http://trainings:hush@127.0.0.1:{free_port()}")
    level, text = report.only("server")
    assert level == "problem"
    assert "no answer from the batch size optimization server at http://127.0.0.1" in text
    assert "hush" not in json.dumps(report.findings)


def test_token_must_allow_trials(ask: Any, server: ServerProcess) -> None:
    tokens = {"": "", **{scope: make_token(server.database_url, scope) for scope in ("read", "report")}}
    for scope, level, says in [
        ("", "problem", "does not accept the token (401"),
        ("read", "problem", "has no scope report"),
        ("report", "ok", "lets this client run trials"),
    ]:
        report = ask(ZEUS_SERVER_URL=server.url, ZEUS_BSO_TOKEN=tokens[scope])
        assert report.only("server")[0] == level
        assert says in report.only("server")[1]
        assert not scope or tokens[scope] not in json.dumps(report.findings)


@pytest.mark.parametrize(
    ("answer", "level", "says"),
    [(404, "warning", "a Zeus 0.16 server does so, too"), (500, "problem", "failed (500): Not Found")],
)
def test_foreign_server_is_reported(ask: Any, answer: int, level: str, says: str) -> None:
    # Wording of FastAPI, the framework of Zeus's server.
    with answering(answer, b'{"detail": "Not Found"}') as server:
        found = ask(ZEUS_SERVER_URL=server.url).only("server")
    assert found[0] == level
    assert says in found[1]


# --- Energy ---------------------------------------------------------------------------------------------------------


def test_counters_and_power_readings_are_listed(ask: Any) -> None:
    report = ask(nvml=FakeNvml([FakeGpu(power_mw=90_000)]))
    assert report.only("nvidia") == ("ok", "GPU 0 (NVIDIA H200): energy counter, power reading (90 W now)")
    assert report.only("energy") == ("ok", "nvml")


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--gpu-check", "run `python -m benchmarks.gpu_check`"),
        ("--reset-power-limits", "run the commands that `zeus-plugins doctor` names"),
    ],
)
def test_removed_option_names_what_to_do_instead(option: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", option]) == 1
    assert f"{option} was removed: {instead}" in capsys.readouterr().err


def test_gpu_without_a_counter_is_reported(ask: Any) -> None:
    report = ask(nvml=FakeNvml([FakeGpu(name="Tesla P100", counter_mj=None, power_mw=90_000)]))
    assert report.only("nvidia") == ("ok", "GPU 0 (Tesla P100): no energy counter, power reading (90 W now)")
    level, text = report.only("energy")
    assert level == "warning"
    assert text.startswith("nvml power, integrated. GPU 0 (Tesla P100) gives no energy counter")


@pytest.mark.parametrize(
    ("limit_mw", "pid", "level", "says"),
    [
        (700_000, None, "ok", "700 W"),
        (400_000, "none", "warning", "400 W, below the default: `nvidia-smi -i GPU-0 -pl 700`"),
        (
            400_000,
            None,
            "warning",
            "400 W, left behind by a killed training: `nvidia-smi -i GPU-0 -pl 700`",
        ),
        (400_000, "live", "ok", "400 W; the training with process id {} sets its power limit, and restores 700 W when"),
    ],
)
def test_limits_left_behind_are_listed(ask: Any, limit_mw: int, pid: str | None, level: str, says: str) -> None:
    if pid != "none":
        record_limit(os.getppid() if pid else None)
    nvml = FakeNvml([FakeGpu(limit_mw=limit_mw, default_mw=700_000)])
    assert ask(nvml=nvml).only("power limit")[0] == level
    assert f"GPU 0 (NVIDIA H200): {says.format(os.getppid())}" in ask(nvml=nvml).only("power limit")[1]
    assert nvml.machine[0].limit_mw == limit_mw


def test_incompatible_gpus_are_a_problem(ask: Any, shared_server: ServerProcess) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu(name="Tesla P100", uuid="GPU-1")])
    report = ask(nvml=nvml, ZEUS_SERVER_URL=shared_server.url)
    assert report.only("nvidia")[0] == report.only("energy")[0] == "problem"
    assert "several models" in report.only("energy")[1]
    assert report.status == 1


def test_invalid_estimated_power_is_a_problem(ask: Any) -> None:
    level, text = ask(nvml=FakeNvml([]), ZEUS_ESTIMATED_POWER_W="lots").only("energy")
    assert level == "problem"
    assert "ZEUS_ESTIMATED_POWER_W is 'lots'" in text


# --- Outbox ---------------------------------------------------------------------------------------------------------


def test_waiting_results_are_counted(ask: Any, state_directory: Path) -> None:
    (state_directory / "outbox").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "c.refused"):
        (state_directory / "outbox" / name).touch()

    report = ask()
    assert report.only("outbox") == (
        "warning",
        f"{state_directory}/outbox: 2 waiting, 1 refused by a server; `zeus-plugins sync` delivers what waits",
    )
    details = next(finding["details"] for finding in report.findings if finding["check"] == "outbox")
    assert sorted(Path(path).name for path in details["waiting"]) == ["a.jsonl", "b.jsonl"]


def test_unwritable_outbox_is_reported(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    level, text = ask(ZEUS_STATE_DIR=str(tmp_path / "file")).only("outbox")
    assert level == "warning"
    assert "cannot be written" in text
    assert "set ZEUS_STATE_DIR" in text


# --- Environment ----------------------------------------------------------------------------------------------------


def test_every_variable_is_listed_set_or_not_and_secrets_are_masked(ask: Any, shared_server: ServerProcess) -> None:
    report = ask(ZEUS_SERVER_URL=shared_server.url, ZEUS_BSO_TOKEN="hush", ZEUS_BSO_TIMEOUT_S="2.5")  # noqa: S106 - no real token

    (details,) = (each["details"] for each in report.findings if each["check"] == "environment")
    assert list(details) == [variable.name for variable in VARIABLES]
    told = {name: (each["is_set"], each["value"], each["unit"]) for name, each in details.items()}
    assert told["ZEUS_SERVER_URL"] == told["ZEUS_BSO_TOKEN"] == (True, "(set)", "")
    assert told["ZEUS_BSO_TIMEOUT_S"] == (True, "2.5", "seconds")
    assert told["ZEUS_JOB_ID"] == (
        False,
        "derived from the training, or set by the server; in a launched run, such as rec01+try01",
        "",
    )
    level, text = report.only("environment")
    assert level == "ok"
    assert text.startswith("set: ZEUS_SERVER_URL=(set), ZEUS_BSO_TOKEN=(set), ZEUS_BSO_TIMEOUT_S=2.5")
    assert "ZEUS_JOB_ID" not in text


@pytest.mark.parametrize(
    ("said", "level"), [("NVML Shared Library Not Found", "ok"), ("Driver/library version mismatch", "warning")]
)
def test_broken_driver_is_a_warning_and_a_missing_one_is_none(
    said: str, level: str, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "open_gpus", lambda: open_gpus(nvml=FakeNvml(broken=said)))
    found, text = ask().only("nvidia")
    assert (found, text.startswith(f"no GPU: the NVIDIA driver does not answer: {said}")) == (level, True)


def test_reader_that_leaves_ends_the_command_without_a_traceback() -> None:
    command = [sys.executable, "-m", "zeus_plugins", "sync", "--dry-run"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
