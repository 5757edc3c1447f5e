"""Units for systemd, read by systemd without starting them; their commands and settings exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bso_server import cli
from bso_server.settings import Settings, variable_of
from tests.support import ROOT

FOLDER = ROOT / "deploy" / "systemd"
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
