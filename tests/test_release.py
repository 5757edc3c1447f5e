"""Releases: one version, a changelog in shape, the licences of what is needed; `.ci/run` builds and installs one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest

from release import changelog, licences, project
from tests.support.servers import bso_server

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
WORKFLOW = ROOT / ".github" / "workflows" / "release.yaml"


def test_the_version_has_one_place() -> None:
    assert metadata("zeus-plugins")["Version"] == project.version()
    assert bso_server("--version").stdout == f"bso-server {project.version()}\n"
    sources = [*ROOT.glob("zeus_plugins/**/*.py"), *ROOT.glob("bso_server/**/*.py")]
    assert [file.name for file in sources if "__version__" in file.read_text()] == []


def test_the_changelog_is_in_shape() -> None:
    assert changelog.problems(CHANGELOG, project.version()) == []
    assert changelog.sections(CHANGELOG)[0].changes


RELEASED = "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- This.\n\n### Fixed\n\n- That.\n\n"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("## [Unreleased]\n\n", "", "the first section is [Unreleased]"),
        ("[Unreleased]", "[Unreleased] - 2026-12-02", "[Unreleased] has a date"),
        (" - 2026-12-01", "", "[0.2.0] has no date"),
        ("### Added", "### News", "[0.2.0] has 'News'"),
        ("- This.", "", "[0.2.0] has an empty 'Added'"),
        ("### Fixed", "### Removed", ""),
        ("### Added", "### Security", "the order within [0.2.0]"),
        ("[0.2.0]", "[0.3.0]", "the newest release is 0.3.0, and pyproject.toml says 0.2.0"),
        ("### Fixed", "## [0.10.0] - 2026-11-01\n\n### Fixed", "[0.2.0] stands above [0.10.0]"),
    ],
)
def test_faults_of_a_changelog_are_told(before: str, after: str, said: str) -> None:
    found = changelog.problems(RELEASED.replace(before, after), "0.2.0")
    assert said in "; ".join(found)
    assert bool(found) is bool(said)


def test_notes_are_what_the_changelog_says_of_the_version() -> None:
    assert changelog.notes(RELEASED, "0.2.0") == "### Added\n\n- This.\n\n### Fixed\n\n- That."
    with pytest.raises(ValueError, match=r"says nothing of 0\.3\.0"):
        changelog.notes("## [Unreleased]\n", "0.3.0")


def test_a_tag_of_another_version_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "release", "notes", "--tag", "v9"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"release: the tag is v9, and pyproject.toml says version {project.version()}, "
        f"whose tag is v{project.version()}\n",
    )


def test_the_licences_of_all_dependencies_are_listed() -> None:
    """Each dependency of users' extras, with the licence that a package states; `make licences` renews it."""
    listed = licences.listed(licences.PAGE.read_text())
    assert {name: extras for name, (extras, _) in listed.items()} == project.dependencies()
    for name, (_, licence) in listed.items():
        with contextlib.suppress(PackageNotFoundError):
            assert licence == licences.licence_of(metadata(name).json), name


@pytest.mark.parametrize(
    ("stated", "licence"),
    [
        ({"license_expression": "MIT", "license": "other"}, "MIT"),
        ({"license": "BSD-3-Clause"}, "BSD-3-Clause"),
        ({"license": "Line\nand line", "classifier": ["License :: OSI Approved :: MIT License"]}, "MIT License"),
        ({"license": "UNKNOWN"}, "stated in its files alone"),
    ],
)
def test_licences_are_read_from_what_packages_state(stated: dict[str, Any], licence: str) -> None:
    assert licences.licence_of(stated) == licence


def test_the_workflow_is_one_that_the_forge_understands() -> None:
    """It cannot be run here: its schema is checked, and continuous integration runs the commands that it runs."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
