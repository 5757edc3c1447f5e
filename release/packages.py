"""The packages of a release: built once, and installed as users install them, into empty environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release.project import CONSTRAINTS, ROOT, users_extras, version

DIST = ROOT / "dist"

_TOOLS = ("build>=1.2", "cyclonedx-bom>=7.0", "twine>=6.0")

# Gigabytes that each installation would load; what needs it is resolved, and not installed.
_HEAVY = frozenset({"ray", "torch"})

# The bill of materials is of these, without what only trainings need, of which each image has versions of its own.
_BILLED = ("server", "postgres", "mysql", "otel")

_LIGHT_USE = (
    "import zeus_plugins, zeus_plugins.energy, zeus_plugins.errors, zeus_plugins.power_limit; zeus_plugins.JobSpec"
)
_SERVER_USE = """
from zeus_plugins.client.connect import client_from_environment
from zeus_plugins.protocol import JobRegistration, TrainingResult

job = JobRegistration(
    job_id_prefix="release", job_id="release", batch_sizes=[8, 16], default_batch_size=8, target_metric=0.9,
    max_power=100, number_of_gpus=1, gpu_model="none",
)
with client_from_environment() as client:
    client.register(job)
    for _ in range(3):
        trial = client.suggest("release")
        named = trial.model_dump(include={"job_id", "batch_size", "trial_number"})
        assert client.report(TrainingResult(**named, time=1, energy=50, metric=0.95, current_epoch=1)).converged
"""


class ReleaseError(Exception):
    """The release is not good; the text says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in this folder."""

    folder: Path

    @classmethod
    def empty(cls, folder: Path, python: str = sys.executable) -> Environment:
        """A new one, with nothing but pip in it."""
        _run([python, "-m", "venv", "--clear", str(folder)])
        return cls(folder)

    def install(self, *requirements: str) -> None:
        """Install packages."""
        _run([self._program("python"), "-m", "pip", "install", "--quiet", *requirements])

    def resolved(self, *requirements: str) -> dict[str, Any]:
        """Pip's report of what it would install; nothing is installed."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
            command = [self._program("python"), "-m", "pip", "install", *options]
            _run([*command, "--constraint", str(CONSTRAINTS), *requirements])
            found: dict[str, Any] = json.loads(report.read_text())
        return found

    def run(self, program: str, *arguments: str, home: Path | None = None) -> str:
        """The output of a program of it, which finds nothing of this checkout and keeps its data in `home`."""
        return _run([self._program(program), *arguments], home=home)

    def _program(self, name: str) -> str:
        return str(self.folder / ("Scripts" if os.name == "nt" else "bin") / name)


def build() -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it, in an empty `dist`; an index can show them."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tools = Environment.empty(Path(folder) / "tools")
        tools.install(*_TOOLS)
        tools.run("python", "-m", "build", "--outdir", str(DIST), str(ROOT))
        (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
        for file in (sdist, wheel):
            if version() not in file.name:
                raise ReleaseError(f"{file.name} is not of version {version()}, as pyproject.toml says")
        tools.run("twine", "check", "--strict", str(sdist), str(wheel))
    return sdist, wheel


def bill_of_materials(wheel: Path) -> Path:
    """The CycloneDX bill of materials of a server's installation, beside the wheel."""
    bill = wheel.with_name(f"zeus-plugins-{version()}.cdx.json")
    with tempfile.TemporaryDirectory() as folder:
        tools = Environment.empty(Path(folder) / "tools")
        tools.install(*_TOOLS)
        installed = Environment.empty(Path(folder) / "installed")
        installed.install(f"{wheel}[{','.join(_BILLED)}]")
        tools.run(
            *("cyclonedx-py", "environment", "--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"),
            *("--output-reproducible", "--output-file", str(bill), str(installed.folder)),
        )
    return bill


def check(wheel: Path, pythons: Sequence[str], extras: Iterable[str] | None = None) -> None:
    """Install the wheel with each extra into an empty environment, and use it; heavy extras are resolved.

    Args:
        wheel: The wheel.
        pythons: The interpreters.
        extras: Those to install; "" is the package without any. None: that, and all that users install.

    Raises:
        ReleaseError: Something cannot be installed, or does not work.
    """
    for python in pythons:
        for extra in ("", *users_extras()) if extras is None else extras:
            with tempfile.TemporaryDirectory() as folder:
                environment = Environment.empty(Path(folder) / "environment", python)
                wanted = f"{wheel}[{extra}]" if extra else str(wheel)
                names = {each["metadata"]["name"] for each in environment.resolved(wanted)["install"]}
                how = "resolved, as it needs " + ", ".join(sorted(names & _HEAVY))
                if not names & _HEAVY:
                    environment.install(wanted)
                    _use(environment, Path(folder), has_server="litestar" in names)
                    how = "installed and used"
                print(f"{python}: {extra or 'no extra'}: {how} ({len(names)} packages)", flush=True)


def _use(environment: Environment, home: Path, *, has_server: bool) -> None:
    environment.run("python", "-m", "pip", "check", home=home)
    environment.run("python", "-c", _LIGHT_USE, home=home)
    said = environment.run("zeus-plugins", "--version", home=home)
    if said.split() != ["zeus-plugins", version()]:
        raise ReleaseError(f"zeus-plugins --version says {said!r}, not {version()}")
    if has_server:
        environment.run("python", "-c", _SERVER_USE, home=home)
        shown = json.loads(environment.run("bso-server", "jobs", "list", "--json", home=home))
        if [job["trials"] for job in shown["jobs"]] != [3]:
            raise ReleaseError(f"three trials were run, and the server knows of {shown}")
        environment.run("bso-server", "jobs", "report", "release", "--output", str(home / "page.html"), home=home)


def _run(command: Sequence[str], *, home: Path | None = None) -> str:
    own = ("PYTHON", "ZEUS_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    if home is not None:
        environ |= {"HOME": str(home), "XDG_DATA_HOME": str(home), "ZEUS_STATE_DIR": str(home / "state")}
    done = subprocess.run(  # noqa: S603 - programs of this module
        command, env=environ, cwd=home or Path(tempfile.gettempdir()), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[:6])} … failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
