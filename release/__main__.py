"""``python -m release``: build and check a release, with tools in separate environments; see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
LICENCES = ROOT / "docs" / "licences.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
VERSION: str = PROJECT["version"]

# Extras for developers of the project; all remaining extras are for users.
_OWN_EXTRAS = frozenset({"deploy", "dev", "docs", "integrations", "maintenance"})
USERS_EXTRAS = [extra for extra in PROJECT["optional-dependencies"] if extra not in _OWN_EXTRAS]

_TOOLS = ("build>=1.2", "cyclonedx-bom>=7.0", "pip-licenses>=5.0", "twine>=6.0")

# These packages download gigabytes, so `check` only resolves extras that need one of them, without installing.
_HEAVY = frozenset({"torch"})

# The bill of materials omits packages that only trainings need: each training image has its own versions.
_BILLED = "server,postgres,mysql"

# All packages of an installation without extras: it must not add others to a training image, nor change its own.
_LIGHT = frozenset(
    {"annotated-types", "anyio", "certifi", "h11", "httpcore", "httpx", "idna", "nvidia-ml-py", "pydantic"}
    | {"pydantic-core", "sniffio", "typing-extensions", "typing-inspection", "zeus-plugins"}
)

_LIGHT_USE = "import zeus_plugins, zeus_plugins.energy, zeus_plugins.power_limit; zeus_plugins.JobSpec"
_SERVER_USE = """
from zeus_plugins.client import client_from_environment
from zeus_plugins.protocol import GpuConfig, JobSpec, JobSpecFromClient, TrainingResult

spec = JobSpec(job_id="release", job_id_prefix="release", batch_sizes=(8, 16), default_batch_size=8, target_metric=0.9)
with client_from_environment() as client:
    client.register(JobSpecFromClient.of(spec, GpuConfig(max_power=100.0, number_of_gpus=1, gpu_model="none")))
    for _ in range(3):
        trial = client.request_trial("release")
        named = trial.model_dump(include={"job_id", "batch_size", "trial_number"})
        assert client.send_report(TrainingResult(**named, time=1, energy=50, metric=0.95, current_epoch=1)).converged
"""

_PAGES = "from bso_server.ui.html import templates; templates().get_template('job.html')"

_LICENCES_HEAD = """# Licences of dependencies

The project itself is under the Apache License 2.0. `make licences` writes this page: what all extras for users bring,
on Linux with Python {python}. A release has a bill of materials (CycloneDX) of a server's installation.

"""


class ReleaseError(Exception):
    """A release must not be published; the message gives the reason."""


def main() -> int:
    """Run a command; return exit status 0, or print the reason to standard error and return 1."""
    parser = argparse.ArgumentParser(prog="python -m release", description="Build, check and describe a release.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    notes_parser = commands.add_parser("notes", help="print what the changelog says of the version")
    notes_parser.add_argument("--tag", help="fail unless the version has this tag, such as v1.2.3")
    commands.add_parser("build", help="build both packages into dist/, with a bill of materials")
    checks = commands.add_parser("check", help="install the wheel in dist/ into empty environments, and use it")
    checks.add_argument("--python", action="append", help="an interpreter, more than once for several (default: this)")
    checks.add_argument("--extra", action="append", help="an extra, or '' for none (default: that, and each of them)")
    commands.add_parser("audit", help="look for known vulnerabilities of the versions in constraints-dev.txt")
    commands.add_parser("licences", help="write docs/licences.md")
    options = parser.parse_args()
    try:
        match options.command:
            case "notes":
                print(notes((ROOT / "CHANGELOG.md").read_text("utf-8"), options.tag or f"v{VERSION}"))
            case "build":
                build()
            case "check":
                check(options.python or [sys.executable], options.extra or ["", *USERS_EXTRAS])
            case "audit":
                audit()
            case "licences":
                write_licences()
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def notes(changelog: str, tag: str) -> str:
    """Return the changelog's section on the release that `tag` names.

    Raises:
        ReleaseError: The tag does not match the project's version, or the changelog has no text on this version.
    """
    if tag != f"v{VERSION}":
        raise ReleaseError(f"the tag is {tag}, and pyproject.toml says version {VERSION}, whose tag is v{VERSION}")
    pattern = rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d\n(.+?)(?=^## \[|\Z)"
    found = re.search(pattern, changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ReleaseError(f"CHANGELOG.md has no section '## [{VERSION}] - YYYY-MM-DD' with what has changed")
    return found[1].strip()


def build() -> None:
    """Empty `dist`, then build the source distribution, the wheel, and a server's bill of materials there."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tools = _environment(Path(folder) / "tools", *_TOOLS)
        _run([tools, "-m", "build", "--outdir", DIST, ROOT])
        packages = [*DIST.glob("*.tar.gz"), *DIST.glob("*.whl")]
        _run([tools, "-m", "twine", "check", "--strict", *packages])
        report = Path(folder) / "report.json"
        installed = _environment(Path(folder) / "installed", "--report", str(report), f"{packages[-1]}[{_BILLED}]")
        bill = DIST / f"zeus-plugins-{VERSION}.cdx.json"
        options = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "--output-reproducible"]
        _run([tools, "-m", "cyclonedx_py", "environment", *options, "--output-file", bill, installed])
        hashed = with_hashes(json.loads(bill.read_text("utf-8")), json.loads(report.read_text("utf-8")))
        bill.write_text(json.dumps(hashed, indent=2) + "\n", "utf-8")
    print(*packages, bill, sep="\n")


def with_hashes(bill: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return the bill of materials with the SHA-256 of each package archive, taken from pip's report.

    Components that are absent from the report, such as pip itself, are removed.
    """
    hashes = {
        _normal(each["metadata"]["name"]): each["download_info"]["archive_info"]["hashes"]["sha256"]
        for each in report["install"]
    }
    own = bill["metadata"]["component"]
    components = [each for each in bill["components"] if _normal(each["name"]) in hashes]
    for each in (own, *components):
        each["hashes"] = [{"alg": "SHA-256", "content": hashes[_normal(each["name"])]}]
    known = {each["bom-ref"] for each in (own, *components)}
    return bill | {
        "components": components,
        "dependencies": [each for each in bill["dependencies"] if each["ref"] in known],
    }


def audit() -> None:
    """Look up the versions of constraints-dev.txt in the index's advisories, and print the result.

    Raises:
        ReleaseError: A version has a known vulnerability.
    """
    options = ["--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"]
    with tempfile.TemporaryDirectory() as folder:
        tools = _environment(Path(folder) / "tools", "pip-audit>=2.9")
        command: list[str | Path] = [tools, "-m", "pip_audit", *options, "--requirement", ROOT / "constraints-dev.txt"]
        # pip-audit exits with 1 both if it finds vulnerabilities and if it cannot reach the index.
        print(audited(_run(command, statuses=(0, 1))))


def audited(answer: str) -> str:
    """Return the result of an audit in words; `answer` is the JSON output of pip-audit, or empty.

    Raises:
        ReleaseError: A version has a known vulnerability.
    """
    versions = json.loads(answer)["dependencies"] if answer else []
    unknown = [each["name"] for each in versions if "skip_reason" in each]
    found = [
        f"{each['name']} {each['version']}: {', '.join(advisory['id'] for advisory in each['vulns'])}"
        for each in versions
        if each.get("vulns")
    ]
    if found:
        raise ReleaseError(f"known vulnerabilities: {'; '.join(found)}; run make lock, or name a fixed version")
    if len(unknown) == len(versions):
        return "no version was audited: pip-audit could reach no index of advisories"
    left_out = f"; not in the index: {', '.join(unknown)}" if unknown else ""
    return f"{len(versions) - len(unknown)} versions were audited and have no known vulnerability{left_out}"


def check(pythons: Iterable[str], extras: Sequence[str]) -> None:
    """Install and use the wheel with each extra, in a new environment of each interpreter.

    Raises:
        ReleaseError: An extra cannot be installed, or does not work.
    """
    (wheel,) = DIST.glob(f"zeus_plugins-{VERSION}-*.whl")
    for python in pythons:
        for extra in extras:
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder)
                program = _environment(home / "environment", python=python)
                wanted = f"{wheel}[{extra}]" if extra else str(wheel)
                report = home / "report.json"
                resolve = ["--dry-run", "--quiet", "--report", str(report), "--constraint", str(CONSTRAINTS)]
                _run([program, "-m", "pip", "install", *resolve, wanted])
                names = {each["metadata"]["name"] for each in json.loads(report.read_text())["install"]}
                if not extra and (more := {_normal(name) for name in names} - _LIGHT):
                    raise ReleaseError(f"an installation without extras brings {', '.join(sorted(more))}, too")
                outcome = f"resolved, as it needs {', '.join(sorted(names & _HEAVY))}"
                if not names & _HEAVY:
                    _run([program, "-m", "pip", "install", "--quiet", wanted])
                    _use(program, home, has_server="litestar" in names)
                    outcome = "installed and used"
                print(f"{python}: {extra or 'no extra'}: {outcome} ({len(names)} packages)", flush=True)


def _use(python: Path, home: Path, *, has_server: bool) -> None:
    """Use an installation as users do, with `home` for all data and without access to this checkout."""
    programs = python.parent
    _run([python, "-m", "pip", "check"], home)
    _run([python, "-c", _LIGHT_USE], home)
    if (said := _run([programs / "zeus-plugins", "--version"], home)) != f"zeus-plugins {VERSION}\n":
        raise ReleaseError(f"zeus-plugins --version says {said!r}, not {VERSION}")
    _run([programs / "zeus-plugins", "doctor"], home, statuses=(0, 1))
    _run([programs / "zeus-plugins", "energy", "--", python, "-V"], home)
    if has_server:
        _run([python, "-c", _SERVER_USE], home)
        shown = json.loads(_run([programs / "bso-server", "jobs", "list", "--json"], home))
        if [job["trials"] for job in shown["jobs"]] != [3]:
            raise ReleaseError(f"three trials were run, and the server knows of {shown}")
        _run([programs / "bso-server", "report"], home)
        _run([python, "-c", _PAGES], home)


def write_licences() -> None:
    """Install all extras for users into a new environment, and write the licence table of pip-licenses."""
    with tempfile.TemporaryDirectory() as folder:
        tools = _environment(Path(folder) / "tools", *_TOOLS)
        wanted = f"{ROOT}[{','.join(USERS_EXTRAS)}]"
        installed = _environment(Path(folder) / "installed", "--constraint", str(CONSTRAINTS), "torch", wanted)
        options = ["--from=mixed", "--format=markdown", "--no-version", "--ignore-packages", "zeus-plugins"]
        table = _run([tools.parent / "pip-licenses", f"--python={installed}", *options])
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    LICENCES.write_text(_LICENCES_HEAD.format(python=python) + table, "utf-8")


def _environment(folder: Path, *requirements: str, python: str = sys.executable) -> Path:
    """Make an environment with the given requirements; return the path of its interpreter."""
    _run([python, "-m", "venv", "--clear", folder])
    program = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if requirements:
        _run([program, "-m", "pip", "install", "--quiet", *requirements])
    return program


def _normal(name: str) -> str:
    """Return the normalised name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(command: Sequence[str | Path], home: Path | None = None, statuses: Sequence[int] = (0,)) -> str:
    """Run a command without the user's settings, in `home` if given; return its standard output."""
    own = ("PYTHON", "ZEUS_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    if home is not None:
        environ |= {"HOME": str(home), "XDG_DATA_HOME": str(home), "ZEUS_STATE_DIR": str(home / "state")}
    done = subprocess.run(  # noqa: S603 - the commands of this module
        command, env=environ, cwd=home or tempfile.gettempdir(), capture_output=True, text=True, check=False
    )
    if done.returncode not in statuses:
        said = (done.stdout + done.stderr)[-3000:]
        raise ReleaseError(f"{' '.join(map(str, command[:6]))} … failed:\n{said}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
