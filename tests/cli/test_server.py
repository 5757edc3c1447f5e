"""The `bso-server` command with arguments of a user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from bso_server.cli import main as bso_server_main
from bso_server.settings import Settings
from tests.support import warm
from tests.support.jobs import job
from tests.support.servers import NEEDED, ServerProcess, bso_server, free_port, wait_until_up
from zeus_plugins.cli import main as zeus_plugins_main
from zeus_plugins.client.http import BsoClient
from zeus_plugins.protocol import CreatedJob, Explanation, JobView, TrainingResult

JOB = CreatedJob(**job(job_id="night.ly-1", job_id_prefix="night"))


@pytest.fixture
def used_server(server: ServerProcess) -> ServerProcess:
    """A server with one completed and one running trial."""
    with BsoClient(server.url) as client:
        client.register(JOB)
        trial = client.request_trial("night.ly-1")
        client.send_report(
            TrainingResult(
                **trial.model_dump(include={"job_id", "batch_size", "trial_number"}),
                time=5,
                energy=500,
                metric=0.95,
                current_epoch=3,
                energy_source="nvml",
            )
        )
        client.request_trial("night.ly-1")
    return server


def sources(server: ServerProcess) -> list[list[str]]:
    return [["--database-url", server.database_url], ["--server-url", server.url]]


def test_show_prints_the_same_from_database_and_server(used_server: ServerProcess) -> None:
    answers = [bso_server("jobs", "show", "night.ly-1", "--json", *source) for source in sources(used_server)]

    assert [answer.returncode for answer in answers] == [0, 0], answers
    assert answers[0].stdout == answers[1].stdout
    shown = json.loads(answers[0].stdout)
    assert {"job", "stage", "min_cost_j", "arms", "trials"} <= set(shown)
    assert (shown["stage"], shown["min_cost_j"]) == ("pruning", 500)
    assert shown["arms"][1] == {
        "batch_size": 16,
        "trials": 1,
        "n": 1,
        "mean_cost_j": 500.0,
        "std_cost_j": None,
        "infeasible": None,
        "expected_cost_j": 500.0,
        "expected_low_j": None,
        "expected_high_j": None,
        "metrics": [
            {"name": None, "runs": 1, "mean": 0.95, "std": None, "lower_is_better": False, "margin": 0.0095}
            | {"low": None, "high": None, "verdict": None}
        ],
        "left_out": None,
    }
    first, second = shown["trials"]
    assert first["reason"] == "exploring: your default size (round 1 of 2)"
    fields = ["trial_number", "batch_size", "state", "origin", "time_s", "energy_j", "energy_source", "cost_j"]
    assert [first[name] for name in fields] == [1, 16, "completed", "exploration", 5, 500, "nvml", 500]
    assert (first["epochs"], first["metric"]) == (3, 0.95)
    assert [second[name] for name in fields] == [2, 8, "running", "exploration", None, None, None, None]
    assert JobView.model_validate(shown).job.model_copy(update={"registration_id": None}) == JOB


def test_show_is_readable(used_server: ServerProcess) -> None:
    show = ("jobs", "show", "night.ly-1", "--database-url", used_server.database_url)
    text = bso_server(*show).stdout
    assert text.splitlines()[0] == (
        "job night.ly-1: pruning stage, 2 trials (1 running, 1 completed), best batch size 16, expected 500 J"
    )
    assert text.splitlines()[2] == ("Your default, 16, is the best batch size so far.")
    assert "energy by nvml" in text
    header = "METRIC +BATCH SIZE +RUNS +MEAN +STD +MINUS THE DEFAULT'S +AGAINST THE DEFAULT"
    assert re.search(rf"^{header}\nthe target's +16 +1 +0.95 +- +- +-$", text, re.MULTILINE)
    # The server has no tokens, so that the view has no column for them.
    assert "TOKEN" not in text
    assert "exploring: smaller than your default size, 16 (round 1 of 2)\n" in text


def test_explain_prints_the_next_choice(used_server: ServerProcess) -> None:
    for source in sources(used_server):
        explain = ("jobs", "explain", "night.ly-1", *source)
        assert bso_server(*explain, "--at", "2").stdout.splitlines() == [
            "job night.ly-1, trial 2: batch size 8 (exploration, running)",
            "",
            "exploring: smaller than your default size, 16 (round 1 of 2); "
            "stop it at 1000 J unless it has reached the target",
            "",
            "BATCH SIZE  EXPECTED COST J  90 % BAND J  CHANCE TO BE BEST",
            "8           -                -            -                  chosen",
            "16          500              -            -                  best so far",
        ]
        text = bso_server(*explain).stdout
        assert text.startswith(
            "job night.ly-1, the next trial: batch size 16 (concurrent)\n\nwhile trial 2 explores 8: "
        )
        told = Explanation.model_validate_json(bso_server(*explain, "--json").stdout)
        assert (told.trial_number, told.batch_size, told.origin, told.state) == (None, 16, "concurrent", None)
        assert "has no trial 3" in bso_server(*explain, "--at", "3").stderr
        assert len(json.loads(bso_server("jobs", "show", "night.ly-1", *source, "--json").stdout)["trials"]) == 2


def test_list_prints_every_job(used_server: ServerProcess) -> None:
    for source in sources(used_server):
        shown = json.loads(bso_server("jobs", "list", "--json", *source).stdout)
        assert [(job["job_id"], job["trials"], job["min_cost_j"]) for job in shown["jobs"]] == [("night.ly-1", 2, 500)]
        assert "night.ly-1" in bso_server("jobs", "list", *source).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "many"], "ZEUS_BSO_SERVER_PORT"),
        (["serve", "--port", "70000"], "ZEUS_BSO_SERVER_PORT"),
        (["serve", "--database-url", "nonsense"], "cannot be read"),
    ],
)
def test_invalid_setting_is_named_in_a_single_line(arguments: list[str], words: str) -> None:
    answer = bso_server(*arguments)
    assert answer.returncode == 1
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["webhook", "add", "https://x"], "docs/alerts.md"),
        (["config", "show"], "docs/settings.md"),
        (["db", "current"], "db check"),
        (["jobs", "share", "nightly"], "token create --share"),
        (["token", "transfer", "0123abcd", "4567cdef"], "docs/tokens.md"),
        (["jobs", "report", "nightly"], "/ui/jobs/JOB"),
    ],
)
def test_removed_command_names_its_replacement(
    arguments: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bso_server_main(arguments) == 1
    assert instead in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("RATE_LIMIT_PER_MINUTE", ".* proxy"),
        ("ECHO_SQL", "log_statement"),
        ("TRACING", "docs"),
        ("SSO_ADMINS", ".* bso-server token"),
    ],
)
def test_removed_setting_names_its_replacement(name: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ZEUS_BSO_{name}", "60")
    with pytest.raises(ValueError, match=rf"ZEUS_BSO_{name} was removed, unset it: {instead}"):
        Settings()


def test_serve_names_the_database(server: ServerProcess) -> None:
    log = server.log.read_text()
    assert f"database: {server.database_url}" in log
    assert server.url in log


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZEUS_BSO_")}
    return {**environment, "XDG_DATA_HOME": str(tmp_path / "data"), "HOME": str(tmp_path)}


def test_serve_without_arguments_stores_the_database_in_the_users_data_directory(
    clean_environment: dict[str, str], tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "log"
    environ = {**clean_environment, "ZEUS_BSO_SERVER_PORT": str(port)}
    process = warm.start("bso_server", "serve", modules=NEEDED, output=log, environ=environ, folder=tmp_path)
    try:
        wait_until_up(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait()
    assert (tmp_path / "data" / "zeus-bso" / "bso.sqlite3").exists()
    assert "zeus-bso/bso.sqlite3" in log.read_text()


@pytest.mark.slow
def test_uvicorn_can_launch_the_application(clean_environment: dict[str, str], tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    database_url = f"sqlite:///{tmp_path / 'uvicorn.sqlite3'}"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "bso_server.app:app", "--port", str(port)],
            env={**clean_environment, "ZEUS_BSO_DATABASE_URL": database_url},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_up(process, f"http://127.0.0.1:{port}", log)
        assert httpx.get(f"http://127.0.0.1:{port}/api/jobs").json()["jobs"] == []
    finally:
        process.terminate()
        process.wait()


def test_importing_the_application_has_no_side_effects_and_uses_no_deprecated_module(tmp_path: Path) -> None:
    environment = {**os.environ, "ZEUS_BSO_DATABASE_URL": f"sqlite:///{tmp_path / 'made' / 'bso.sqlite3'}"}
    command = [sys.executable, "-W", "error", "-c", "import bso_server.app, bso_server.__main__"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("main", [bso_server_main, zeus_plugins_main])
def test_both_commands_print_the_version(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.split()[1] == version("zeus-plugins")
