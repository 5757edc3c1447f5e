"""Releases: one version, a well-formed changelog, licences of dependencies; `.ci/run` builds and installs a release."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from release.__main__ import LICENCES, PROJECT, USERS_EXTRAS, VERSION, ReleaseError, audited, notes, with_hashes
from tests.support import ROOT
from tests.support.artefacts import DEPLOY, DOCKERFILES, WORKFLOW_FILE
from tests.support.servers import bso_server

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def names(requirements: list[str]) -> set[str]:
    """Return the normalized package names (PEP 503) in requirements, without this project."""
    found = {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", each)[0]).lower() for each in requirements}
    return found - {"zeus-plugins"}


def test_version_is_stated_in_a_single_place() -> None:
    assert metadata("zeus-plugins")["Version"] == VERSION
    assert bso_server("--version").stdout == f"bso-server {VERSION}\n"
    sources = [*ROOT.glob("zeus_plugins/**/*.py"), *ROOT.glob("bso_server/**/*.py")]
    assert [file.name for file in sources if "__version__" in file.read_text()] == []
    assert f"version: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


def test_packages_on_the_path_alone_have_an_unknown_version(tmp_path: Path) -> None:
    site = Path(next(place for place in sys.path if place.endswith("site-packages")))
    for each in site.iterdir():  # all that is installed, but this distribution
        if "zeus_plugins" not in each.name:
            (tmp_path / each.name).symlink_to(each)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    for module, name in (("zeus_plugins", "zeus-plugins"), ("bso_server", "bso-server")):
        command = [sys.executable, "-S", "-m", module, "--version"]
        done = subprocess.run(command, env=path, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == (f"{name} 0+unknown\n", 0), done.stderr


def test_changelog_is_well_formed() -> None:
    first, *releases = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", release) for release in releases]
    numbers = [tuple(map(int, each.groups())) for each in found if each is not None]
    assert len(numbers) == len(releases)
    assert numbers == sorted(set(numbers), reverse=True)
    assert numbers[:1] in ([], [tuple(map(int, VERSION.split(".")))])
    for section in re.split(r"^## .*$", CHANGELOG, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert kinds == sorted(kinds, key=KINDS.index)


def test_release_notes_equal_the_changelog_section() -> None:
    changelog = (
        f"## [Unreleased]\n\n## [{VERSION}] - 2026-12-01\n\nWords.\n\n### Added\n\n- This.\n\n## [0.0.1] - 2026-11-01\n"
    )
    assert notes(changelog, f"v{VERSION}") == "Words.\n\n### Added\n\n- This."
    for nothing in ("## [Unreleased]\n\n- This.\n", changelog.replace("Words.\n\n### Added\n\n- This.\n\n", "")):
        with pytest.raises(ReleaseError, match=rf"has no section '## \[{VERSION}\]"):
            notes(nothing, f"v{VERSION}")


def test_tag_of_a_different_version_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "release", "notes", "--tag", "v9"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = f"release: the tag is v9, and pyproject.toml says version {VERSION}, whose tag is v{VERSION}\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_bill_of_materials_has_a_hash_for_each_installed_package() -> None:
    def component(name: str) -> dict[str, Any]:
        return {"name": name, "bom-ref": f"{name}==1"}

    bill = {
        "metadata": {"component": component("zeus-plugins")},
        "components": [component("SQLAlchemy"), component("pip"), component("typing_extensions")],
        "dependencies": [{"ref": f"{name}==1"} for name in ("zeus-plugins", "SQLAlchemy", "pip")],
    }
    report = {
        "install": [
            {"metadata": {"name": name}, "download_info": {"archive_info": {"hashes": {"sha256": name[0] * 64}}}}
            for name in ("zeus-plugins", "sqlalchemy", "typing-extensions")
        ]
    }
    hashed = with_hashes(bill, report)
    components = [hashed["metadata"]["component"], *hashed["components"]]
    assert [each["name"] for each in components] == ["zeus-plugins", "SQLAlchemy", "typing_extensions"]
    assert [each["hashes"] for each in components] == [[{"alg": "SHA-256", "content": it * 64}] for it in "zst"]
    assert [each["ref"] for each in hashed["dependencies"]] == ["zeus-plugins==1", "SQLAlchemy==1"]


def test_audit_reports_vulnerable_and_unknown_versions() -> None:
    good = {"name": "good", "version": "1", "vulns": []}
    unknown = {"name": "own", "skip_reason": "Dependency not found on PyPI"}

    def answer(*versions: dict[str, Any]) -> str:
        return json.dumps({"dependencies": versions, "fixes": []})

    assert audited(answer(good)) == "1 versions were audited and have no known vulnerability"
    assert audited(answer(good, unknown)).endswith("no known vulnerability; not in the index: own")
    for nothing in ("", answer(unknown)):
        assert audited(nothing).startswith("no version was audited")
    bad = {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1"}, {"id": "PYSEC-2"}]}
    with pytest.raises(ReleaseError, match="known vulnerabilities: bad 2: PYSEC-1, PYSEC-2"):
        audited(answer(good, unknown, bad))


def test_licences_of_all_dependencies_are_listed() -> None:
    wanted = names([*PROJECT["dependencies"], *(each for extra in USERS_EXTRAS for each in extras()[extra])])
    listed = names(re.findall(r"^\| ([\w.-]+) +\|", LICENCES.read_text(), re.MULTILINE))
    assert wanted - listed == set(), "make licences writes the page anew"


def test_development_versions_are_locked() -> None:
    wanted = names([each for extra in extras() for each in extras()[extra]])
    locked = names(re.findall(r"^([\w.-]+)==", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE))
    assert wanted - locked == set(), "make lock writes the file anew"


def extras() -> dict[str, list[str]]:
    found: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return found


@pytest.mark.parametrize("workflow", [*WORKFLOWS, WORKFLOW_FILE], ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    text = workflow.read_text()
    used = re.findall(r"uses: (.*)$", text, re.MULTILINE)
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []


def test_release_publishes_the_tested_files() -> None:
    jobs: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs["images"]["needs"]) == {"test", "check"}
    assert set(jobs["announce"]["needs"]) == {"publish", "images"}
    for name in ("test", "check", "publish", "images", "announce"):
        steps = "\n".join(str(step.get("run", "")) for step in jobs[name]["steps"])
        assert "sha256sum --check SHA256SUMS" in steps
    assert any(step.get("run") == ".ci/run" for step in jobs["test"]["steps"])
    # Both images are built and tried before they are pushed.
    assert {each["file"] for each in jobs["images"]["strategy"]["matrix"]["include"]} == {
        str(path.relative_to(ROOT)) for path in DOCKERFILES
    }
    commands = [step["run"] for step in jobs["images"]["steps"] if "run" in step]
    first = [
        min(index for index, each in enumerate(commands) if command in each)
        for command in ("docker build", "docker run", "docker push")
    ]
    assert first == sorted(set(first))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_has_the_tested_versions_on_a_base_that_cannot_change(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    (base,) = re.findall(r"^ARG BASE=(.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    # Dependencies come before the source, and the source brings none.
    dependencies, source = text.split("\nCOPY . .\n")
    assert "--constraint constraints-dev.txt" in dependencies
    assert re.findall(r"^COPY (.*)$", dependencies, re.MULTILINE) == ["pyproject.toml constraints-dev.txt ./"]
    assert "install --no-cache-dir --no-deps --force-reinstall ." in source
    assert "!constraints-dev.txt" in (ROOT / ".dockerignore").read_text().splitlines()
    tested = (ROOT / "constraints.txt").read_text().split()
    assert set(tested) <= set((ROOT / "constraints-dev.txt").read_text().splitlines())
    assert [each.partition("==")[0] for each in tested] == ["torch"]


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("github-workflows", [*WORKFLOWS, WORKFLOW_FILE]),
        ("github-issue-forms", list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yaml"))),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
        pytest.param("compose-spec", [DEPLOY / "compose.yaml"], marks=pytest.mark.slow),
    ],
)
def test_files_fit_the_schemas_of_the_consumers(schema: str, paths: list[Path]) -> None:
    """Check the schema of workflows, which cannot run here; continuous integration runs their commands."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
