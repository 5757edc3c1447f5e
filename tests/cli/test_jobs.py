"""`bso-server jobs export|import|delete` and `db prune`, on a database and through a server with or without tokens."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from bso_server.cli import main
from bso_server.cli.common import SERVER_URL_VARIABLE, TOKEN_VARIABLE
from tests.support import service
from tests.support.exports import Lines, decoded, encoded, renamed
from tests.support.jobs import job
from tests.support.servers import ServerProcess, bso_server, free_port, serving
from tests.support.tokens import make_token
from tests.support.wire import begin, reached, report

Output = tuple[int, str, str]
"""Exit status, standard output, standard error."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without tokens, for tests that leave jobs without affecting each other."""
    folder = tmp_path_factory.mktemp("open")
    with serving(f"sqlite:///{folder / 'bso.sqlite3'}", folder) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    """A server with tokens, and a token of each of two scopes."""
    folder = tmp_path_factory.mktemp("guarded")
    url = f"sqlite:///{folder / 'bso.sqlite3'}"
    tokens = {scope: make_token(url, scope) for scope in ("admin", "read")}
    with serving(url, folder) as server:
        yield server, tokens


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.delenv(SERVER_URL_VARIABLE, raising=False)


@pytest.fixture(params=["--database-url", "--server-url"])
def source(request: pytest.FixtureRequest, server: ServerProcess) -> list[str]:
    """Arguments that select the database or the server."""
    return [request.param, server.database_url if request.param == "--database-url" else server.url]


@pytest.fixture
def database(server: ServerProcess) -> list[str]:
    return ["--database-url", server.database_url]


def run(*arguments: str | Path) -> Output:
    done = bso_server(*map(str, arguments))
    return done.returncode, done.stdout, done.stderr


def new_id() -> str:
    return f"cli-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def job_id(server: ServerProcess) -> str:
    """Id of a job with one completed and one running trial, with one epoch each."""
    job_id = new_id()
    with httpx.Client(base_url=server.url) as http:
        http.post("/jobs", json=job(job_id=job_id)).raise_for_status()
        trial = begin(http, job_id)
        report(http, trial, time=1, energy=100, metric=0.25, current_epoch=1).raise_for_status()
        reached(http, trial, cost_j=500)
        report(http, begin(http, job_id), time=1, energy=100, metric=0.25, current_epoch=1).raise_for_status()
    return job_id


def shown(server: ServerProcess, job_id: str) -> dict[str, Any]:
    """Return the server's view of a job except its id."""
    job: dict[str, Any] = httpx.get(f"{server.url}/api/jobs/{job_id}").raise_for_status().json()
    assert job["job"].pop("job_id") == job_id
    return job


def assert_failed(output: Output, *words: str) -> None:
    """Assert that the command failed with one line on standard error that contains these words."""
    status, out, err = output
    assert (status, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("bso-server: ")
    for word in words:
        assert word in line


class TestShow:
    def test_terminal_gets_the_latest_trials_and_scripts_get_all(
        self, server: ServerProcess, job_id: str, source: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bso_server.cli.jobs.MAX_PAGE", 10)  # force several pages from a server
        with httpx.Client(base_url=server.url) as http:
            for _ in range(22):
                begin(http, job_id)
        every = [*range(1, 25)]
        status, out, err = run("jobs", "show", job_id, *source)
        assert (status, err) == (0, "")
        assert numbers_in(out) == every[-20:]
        assert "24 trials (23 running, 1 completed)" in out
        assert "The latest 20 of 24 trials; --all shows them all." in out
        _, out, _ = run("jobs", "show", job_id, "--all", *source)
        assert numbers_in(out) == every
        assert "The latest" not in out
        _, out, _ = run("jobs", "show", job_id, "--json", *source)
        shown = json.loads(out)
        assert [trial["trial_number"] for trial in shown["trials"]] == every
        assert shown == httpx.get(f"{server.url}/api/jobs/{job_id}").raise_for_status().json()

    def test_texts_of_trainings_cannot_control_the_terminal_or_forge_a_line(
        self, server: ServerProcess, source: list[str]
    ) -> None:
        job_id, forged = new_id(), "x\nTRIAL  BATCH SIZE\x1b[2J"
        with httpx.Client(base_url=server.url) as http:
            http.post("/jobs", json=job(job_id=job_id)).raise_for_status()
            told = {"time": 1, "energy": 100, "metric": 0.25, "current_epoch": 1, "energy_source": forged}
            report(http, begin(http, job_id), **told, watched={"loss\x85": 1.0}).raise_for_status()
        status, out, _ = run("jobs", "show", job_id, *source)
        assert status == 0
        assert r"energy by x\nTRIAL  BATCH SIZE\x1b[2J" in out
        assert r"loss\x85" in out
        assert out.replace("\n", "").isprintable()

    def test_long_id_widens_only_a_single_row(self, server: ServerProcess, job_id: str, source: list[str]) -> None:
        long_id = "cli-" + uuid.uuid4().hex.ljust(226, "x")
        httpx.post(f"{server.url}/jobs", json=job(job_id=long_id)).raise_for_status()
        status, out, _ = run("jobs", "list", *source)
        rows = {line.split()[0]: line for line in out.splitlines()}
        assert status == 0
        assert len(rows[long_id]) > 230
        assert len(rows[job_id]) < 100
        assert len(rows["JOB"]) < 110

    def test_closed_output_pipe_causes_no_error(self, server: ServerProcess, job_id: str) -> None:
        assert job_id
        command = [sys.executable, "-m", "bso_server", "jobs", "list", "--database-url", server.database_url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (141, "")


class TestWhereToLook:
    def test_commands_use_the_server_of_the_environment_unless_overridden(
        self, server: ServerProcess, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ZEUS_BSO_DATABASE_URL", f"sqlite:///{tmp_path / 'other.sqlite3'}")
        for url in (f" {server.url}\n", f"embedded://{server.database_url.removeprefix('sqlite:///')}"):
            monkeypatch.setenv(SERVER_URL_VARIABLE, url)
            assert job_id in run("jobs", "list")[1]
            assert job_id in run("jobs", "show", job_id)[1]
        absent = f"http://127.0.0.1:{free_port()}"
        monkeypatch.setenv(SERVER_URL_VARIABLE, absent)
        assert_failed(run("jobs", "list"), f"no answer from {absent}")
        assert job_id in run("jobs", "list", "--server-url", server.url)[1]
        assert job_id in run("jobs", "list", "--database-url", server.database_url)[1]

    def test_simulate_uses_the_server_of_the_environment(
        self, server: ServerProcess, job_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(SERVER_URL_VARIABLE, server.url)
        status, out, _ = run("simulate", "--job", job_id, "--seeds", "1", "--recurrences", "2")
        assert (status, "took" in out) == (0, True), out


def numbers_in(table: str) -> list[int]:
    """Return the numbers of the trials in the output of `jobs show`."""
    lines = table.partition("\nTRIAL ")[2].splitlines()[1:]
    return [int(line.split()[0]) for line in lines if line[:1].isdigit()]


class TestExport:
    def test_job_is_exported_as_lines(self, server: ServerProcess, job_id: str, source: list[str]) -> None:
        status, out, err = run("jobs", "export", job_id, *source)
        assert (status, err) == (0, "")
        assert out == httpx.get(f"{server.url}/api/jobs/{job_id}/export").text
        head, *trials = decoded(out)
        assert (head["job"]["job_id"], head["trials"], len(trials)) == (job_id, 2, 2)

    def test_export_of_an_unknown_job_prints_nothing(self, source: list[str]) -> None:
        assert_failed(run("jobs", "export", "nobodys", *source), "unknown job")


@pytest.fixture
def exported(server: ServerProcess, job_id: str, tmp_path: Path) -> Path:
    """File with an export of the job."""
    file = tmp_path / "job.jsonl"
    file.write_text(run("jobs", "export", job_id, "--server-url", server.url)[1])
    return file


class TestImport:
    def test_import_accepts_a_new_id(
        self, server: ServerProcess, job_id: str, exported: Path, database: list[str]
    ) -> None:
        other = new_id()
        exported.write_bytes(encoded(renamed(decoded(exported.read_text()), other)))
        imported = (0, f"job {other} is imported with 2 trials\n", "")
        assert run("jobs", "import", exported, *database) == imported
        assert shown(server, other) == shown(server, job_id)

    def test_import_over_a_server_names_what_to_do(
        self, server: ServerProcess, exported: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        status, out, err = run("jobs", "import", exported, "--server-url", server.url)
        assert (status, out) == (2, "")
        assert "--server-url was removed: jobs import needs the database" in err
        monkeypatch.setenv(SERVER_URL_VARIABLE, server.url)
        words = ("ZEUS_SERVER_URL names a server", "name the database by --database-url")
        assert_failed(run("jobs", "import", exported), *words)

    def test_missing_file_is_reported(self, tmp_path: Path, database: list[str]) -> None:
        assert_failed(run("jobs", "import", tmp_path / "absent.jsonl", *database), "absent.jsonl", "No such file")

    @pytest.mark.parametrize("text", ["", "{", '{"format": ', "trial_number,batch_size\r\n1,16\r\n", "[]", "\0", "é"])
    def test_file_without_a_job_is_refused(self, tmp_path: Path, database: list[str], text: str) -> None:
        file = tmp_path / "broken.jsonl"
        file.write_text(text, encoding="latin-1")
        assert_failed(run("jobs", "import", file, *database), "broken.jsonl", "" if text else "it is empty")


def jobs_in(text: str) -> list[Lines]:
    """Return the exports in a text, ordered by job id."""
    jobs: list[Lines] = []
    for line in decoded(text):
        if "format" in line:
            jobs.append([])
        jobs[-1].append(line)
    return sorted(jobs, key=lambda lines: str(lines[0]["job"]["job_id"]))


class TestAllJobs:
    """Exports of all jobs in one text, and their import."""

    @pytest.mark.usefixtures("job_id")
    def test_all_jobs_are_imported_into_each_kind_of_database(
        self, server: ServerProcess, database_url: str, tmp_path: Path
    ) -> None:
        first = tmp_path / "first.jsonl"
        # Ensure at least two jobs, independent of earlier tests on this server.
        httpx.post(f"{server.url}/jobs", json=job(job_id=new_id())).raise_for_status()
        here, there = (["--database-url", url] for url in (server.database_url, database_url))
        first.write_text(run("jobs", "export", "--all", *here)[1])
        run("db", "upgrade", *there)
        number = len(jobs_in(first.read_text()))
        status, out, err = run("jobs", "import", first, *there)
        assert (status, out.count("is imported with"), err) == (0, number, "")
        status, second, err = run("jobs", "export", "--all", *there)
        assert (status, err) == (0, "")
        assert jobs_in(second) == jobs_in(first.read_text())
        status, out, err = run("jobs", "import", first, *there)
        assert (status, out, err.count("exists")) == (1, "", number)
        assert f"{number} of {number} jobs of {first} are not imported" in err

    def test_refused_job_does_not_prevent_further_imports(
        self, exported: Path, database: list[str], tmp_path: Path
    ) -> None:
        first = decoded(exported.read_text())
        jobs = [first, *(renamed(first) for _ in range(3))]
        jobs[2][1]["batch_size"] = 32
        file = tmp_path / "some.jsonl"
        # Another program may have left blank lines.
        file.write_bytes(b"\n".join([*map(encoded, jobs), b'{"format": 1}']))
        status, out, err = run("jobs", "import", file, *database)
        imported = [jobs[1][0]["job"]["job_id"], jobs[3][0]["job"]["job_id"]]
        assert (status, out) == (1, "".join(f"job {each} is imported with 2 trials\n" for each in imported))
        exists, contradicts, no_export, all_in_all = err.splitlines()
        assert "exists" in exists
        assert "line 10, batch_size: " in contradicts
        assert "line 17, format: " in no_export
        assert all_in_all == f"bso-server: 3 of 5 jobs of {file} are not imported"

    def test_export_requires_a_job_or_all(self, source: list[str]) -> None:
        for wrong in ([], ["some", "--all"]):
            status, _, err = run("jobs", "export", *wrong, *source)
            assert (status, "usage:" in err) == (2, True)


class TestDelete:
    def test_job_is_deleted(self, server: ServerProcess, job_id: str, source: list[str]) -> None:
        assert_failed(run("jobs", "delete", job_id, *source), f"nothing is deleted: --yes deletes job {job_id}")
        assert run("jobs", "delete", job_id, "--yes", *source) == (0, f"job {job_id} is deleted\n", "")
        assert httpx.get(f"{server.url}/api/jobs/{job_id}").status_code == 404
        for command in (["delete", "--yes"], ["show"]):
            assert_failed(run("jobs", *command, job_id, *source), f"unknown job '{job_id}'")

    @pytest.mark.parametrize(("answer", "is_deleted"), [("y", True), ("Yes", True), ("", False), ("n", False)])
    def test_terminal_is_asked(
        self, server: ServerProcess, job_id: str, monkeypatch: pytest.MonkeyPatch, answer: str, is_deleted: bool
    ) -> None:
        asked: list[str] = []
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer)
        status, _, err = run("jobs", "delete", job_id, "--server-url", server.url)
        assert asked == [f"Delete job {job_id} with all its runs? [y/N] "]
        assert (status, "nothing is deleted" in err) == ((0, False) if is_deleted else (1, True))
        assert httpx.get(f"{server.url}/api/jobs/{job_id}").is_success is not is_deleted


def test_trial_is_discarded(server: ServerProcess, job_id: str, source: list[str]) -> None:
    assert run("jobs", "discard", job_id, 1, *source) == (0, f"trial 1 of job {job_id} is set aside\n", "")
    job = shown(server, job_id)
    assert [(trial["state"], trial["end_reason"]) for trial in job["trials"]] == [
        ("withdrawn", "discarded"),
        ("running", None),
    ]
    assert "it was completed (target reached" in job["trials"][0]["message"]
    assert (job["min_cost_j"], [arm["n"] for arm in job["arms"]]) == (None, [0] * len(job["arms"]))
    assert_failed(run("jobs", "discard", job_id, 2, *source), "trial 2 is running, and only one that has ended")
    assert_failed(run("jobs", "discard", job_id, 3, *source), f"job '{job_id}' has no trial 3")


def test_job_is_revised(job_id: str, source: list[str]) -> None:
    stated = ["--eta", "0.7", "--beta", "none", "--max-epochs", "6", "--batch-sizes", "16", "32", "--controls", "0"]
    changes = "batch_sizes +32 -8, eta_knob 0.5 -> 0.7, beta_knob 2 -> none, max_epochs 100 -> 6, controls 0.08 -> 0"
    assert run("jobs", "revise", job_id, *stated, *source) == (0, f"job {job_id} revised: {changes}\n", "")
    assert run("jobs", "revise", job_id, *stated, *source)[:2] == (0, f"job {job_id} has these terms already\n")
    shown = run("jobs", "show", job_id, *source)[1]
    assert "Revised before trial 3, 20" in shown
    assert f": {changes}." in shown
    (revision,) = json.loads(run("jobs", "show", job_id, "--json", *source)[1])["revisions"]
    assert (revision["trials"], revision["changes"]["max_epochs"]) == (2, {"before": 100, "after": 6})


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        (["--batch-sizes", "8"], "default_batch_size: 16 is not one of batch_sizes [8]"),
        (["--controls", "0.9"], "controls: Input should be less than or equal to 0.5"),
        (["--eta", "2"], "eta_knob: Input should be less than or equal to 1"),
        ([], "state at least one term: --eta, --beta, --max-epochs"),
    ],
)
def test_invalid_revision_names_the_term(job_id: str, source: list[str], stated: list[str], problem: str) -> None:
    code, _, error = run("jobs", "revise", job_id, *stated, *source)
    assert code == 1
    assert problem in error


async def test_verify_compares_stored_state_with_the_trials(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'bso.sqlite3'}"
    async with service.job_service(database) as job:
        await job.reach(await job.suggest(), 500.0)
        await job.suggest()
    at = ["--database-url", database]
    undetected = "changed values in intact pages, because SQLite has no checksums"
    said = f"not detected: {undetected}\n1 jobs have the same caches as a replay of their trials\n"
    assert run("db", "verify", *at) == (0, said, "")
    found = {"jobs": 1, "differences": {}, "unchecked": {}, "damage": [], "undetected": undetected}
    assert json.loads(run("db", "verify", "--json", *at)[1]) == found
    with closing(sqlite3.connect(tmp_path / "bso.sqlite3")) as file:
        file.execute("UPDATE arms SET arm = json_set(arm, '$.trials', 7) WHERE batch_size = 16")
        file.execute("UPDATE jobs SET min_cost_j = 1e-9")
        file.commit()
    status, out, err = run("db", "verify", *at)
    assert (status, "arm 16 is Arm(batch_size=16, trials=7" in out, "cheapest trial" in out) == (1, True, True)
    assert err.startswith("bso-server: the caches of 1 of 1 jobs differ")
    status, out, _ = run("db", "verify", "--json", *at)
    assert (status, [len(said) for said in json.loads(out)["differences"].values()]) == (1, [2])
    with closing(sqlite3.connect(tmp_path / "bso.sqlite3")) as file:
        file.execute("""UPDATE jobs SET spec = replace(spec, '"zeus"', '"nobodys"')""")
        file.commit()
    status, out, _ = run("db", "verify", *at)
    assert (status, "cannot be checked: policy 'nobodys' is not installed" in out) == (0, True)


class TestTokens:
    def test_guarded_server_requires_a_token(
        self, guarded: tuple[ServerProcess, dict[str, str]], exported: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server, tokens = guarded
        source, job_id = ["--server-url", server.url], new_id()
        exported.write_bytes(encoded(renamed(decoded(exported.read_text()), job_id)))
        run("jobs", "import", exported, "--database-url", server.database_url)
        commands: list[list[Any]] = [
            ["jobs", "export", job_id, *source],
            ["jobs", "delete", job_id, "--yes", *source],
        ]
        for command in commands:
            assert_failed(run(*command), server.url, "401", "needs a token")
        monkeypatch.setenv(TOKEN_VARIABLE, f" {tokens['admin']}\n")
        for command in commands:
            status, out, err = run(*command)
            assert (status, err) == (0, ""), command
            assert job_id in out or "trial_number" in out

    def test_token_in_the_url_is_used_and_hidden(self, guarded: tuple[ServerProcess, dict[str, str]]) -> None:
        server, tokens = guarded
        for url, words in (
            (server.url.replace("//", f"//me:{tokens['admin']}@"), "404"),
            (f"http://me:{tokens['admin']}@127.0.0.1:{free_port()}", "no answer from http://127.0.0.1"),
        ):
            output = run("jobs", "export", "none", "--server-url", url)
            assert_failed(output, words)
            assert tokens["admin"] not in output[2]


def forgotten(reports: int) -> Output:
    return 0, f"{reports} reports are forgotten\n", ""


class TestPrune:
    def test_old_reports_are_pruned(self, tmp_path: Path, exported: Path, job_id: str) -> None:
        job, *trials = decoded(exported.read_text())
        # One report of a trial that has ended, and the last report of a running trial.
        assert [len(trial["epochs"]) for trial in trials] == [1, 1]
        for trial in trials:
            trial["epochs"][0]["reported_at"] = "2020-01-01T00:00:00Z"
        exported.write_bytes(encoded([job, *trials]))
        source = ["--database-url", f"sqlite:///{tmp_path / 'old.sqlite3'}"]
        run("db", "upgrade", *source)
        run("jobs", "import", exported, *source)
        before = run("jobs", "show", job_id, *source)

        for age, reports in (("1500w", 0), ("30d", 2), ("0h", 0)):
            assert run("db", "prune", "--older-than", age, *source) == forgotten(reports)
        assert run("jobs", "show", job_id, *source) == before

    def test_database_without_tables_is_reported(self, tmp_path: Path) -> None:
        source = ["--database-url", f"sqlite:///{tmp_path / 'empty.sqlite3'}"]
        for command in (["db", "prune", "--older-than", "1d"], ["jobs", "list"]):
            assert_failed(run(*command, *source), "bso-server db upgrade")

    @pytest.mark.parametrize("age", ["", "30", "d", "1.5d", "-1d", "30m", "30D", "99999d", "1d ", "１d", "1d2h"])
    def test_invalid_age_is_refused(self, capsys: pytest.CaptureFixture[str], age: str) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["db", "prune", f"--older-than={age}"])
        assert caught.value.code == 2
        assert f"{age!r} is no time: write hours, days or weeks as 12h, 30d or 8w" in capsys.readouterr().err
