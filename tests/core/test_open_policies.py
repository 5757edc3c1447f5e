"""Policies of other packages, from installation to decisions, and after their removal."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from bso_server.core.policy import GROUP, find, names
from bso_server.errors import PolicyNotInstalledError
from bso_server.service.health import differences
from tests.support import ROOT, jobs
from tests.support.exports import exported, import_lines, renamed
from tests.support.policies import check_policy
from tests.support.servers import ServerProcess
from tests.support.service import JobService, job_service
from zeus_plugins.protocol import OWN_POLICIES, JobSpec, Origin


class Packages:
    """Packages that provide policies to this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.syspath_prepend(folder)

    def install(self, package: str, policy: str, source: str, value: str = "POLICY") -> None:
        """Install or update a package with a single module of the same name that contains a policy."""
        (self._folder / f"{package}.py").write_text(source)
        metadata = self._folder / f"{package}-1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{policy} = {package}:{value}\n")
        self._start_anew(package)

    def uninstall(self, package: str) -> None:
        """Remove a package."""
        (self._folder / f"{package}.py").unlink()
        for file in (metadata := self._folder / f"{package}-1.0.dist-info").iterdir():
            file.unlink()
        metadata.rmdir()
        self._start_anew(package)

    def _start_anew(self, package: str) -> None:
        """Remove all traces of the package from this process, as if it had just started."""
        sys.modules.pop(package, None)
        cached = self._folder / "__pycache__"
        for file in cached.glob(f"{package}.*.pyc"):
            file.unlink()
        importlib.invalidate_caches()
        find.cache_clear()


# The worked example.
(EXAMPLE,) = (
    code
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/policy-custom.md").read_text(), re.DOTALL)
    if "POLICY = " in code
)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    folder = tmp_path / "packages"
    folder.mkdir()
    yield Packages(folder, monkeypatch)
    find.cache_clear()


@pytest.fixture
async def server(packages: Packages, database_url: str) -> AsyncIterator[JobService]:
    """Start a server with a job of the worked example's policy."""
    packages.install("latest", "my_policy", EXAMPLE)
    async with job_service(database_url, policy="my_policy") as server:
        yield server


def test_own_policies_are_found_like_installed_policies() -> None:
    assert [find(name).missing for name in OWN_POLICIES] == [None, None]
    assert set(OWN_POLICIES) <= set(names())


@pytest.mark.parametrize(
    ("seeds", "trials"), [((4,), 30), pytest.param(range(4), 60, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_own_policies_conform_in_random_histories(policy: str, seeds: Sequence[int], trials: int) -> None:
    check_policy(policy, seeds=seeds, trials=trials)


def test_installed_package_cannot_replace_an_own_policy(packages: Packages) -> None:
    packages.install("taker", "zeus", EXAMPLE)
    assert find("zeus").prunes


def test_example_policy_passes_the_conformance_suite(packages: Packages) -> None:
    packages.install("latest", "my_policy", EXAMPLE)
    check_policy("my_policy", seeds=(0,))


async def test_policy_of_another_package_decides_a_job(server: JobService) -> None:
    for size, cost_j in ((16, 700), (8, 400), (32, 900)):
        trial = await server.suggest()
        assert (trial.batch_size, trial.origin) == (size, Origin.EXPLORATION)
        await server.reach(trial, cost_j=cost_j)
    trial = await server.suggest()
    assert (trial.batch_size, trial.origin) == (8, Origin.INCUMBENT)
    assert trial.reason == "the latest run of 8 was the cheapest"
    await server.reach(trial, cost_j=800)
    assert (await server.suggest()).batch_size == 16
    assert await server.differences() == []


async def test_new_version_of_a_policy_relearns_from_all_trials(packages: Packages, server: JobService) -> None:
    # The new version uses the first run of each size instead of the latest, and remembers more.
    other = EXAMPLE.replace('version="1"', 'version="2"').replace(
        "{trial.batch_size: cost_of(job, trial)}",
        "{trial.batch_size: costs.get(trial.batch_size, cost_of(job, trial))}",
    )
    for cost_j in (700, 400, 900, 800):
        await server.reach(await server.suggest(), cost_j=cost_j)
    packages.install("latest", "my_policy", other)
    assert await server.differences() == []
    assert (await server.suggest()).batch_size == 8
    packages.install("latest", "my_policy", EXAMPLE)
    assert (await server.suggest()).batch_size == 16
    assert await server.differences() == []


async def test_job_without_policy_gets_no_new_trials_but_running_trials_finish(
    packages: Packages, server: JobService
) -> None:
    await server.reach(await server.suggest(), cost_j=700)
    running, crashing = await server.suggest(), await server.suggest()
    packages.uninstall("latest")
    with pytest.raises(PolicyNotInstalledError, match=r"'my_policy' is not installed .* install the package") as told:
        await server.suggest()
    assert told.value.field == "policy"
    assert not (await server.report(running, cost_j=100)).stop_train
    await server.reach(running, cost_j=400)
    await server.end(crashing)
    shown = await server.show()
    assert [trial.state for trial in shown.trials] == ["completed", "completed", "failed"]
    assert shown.best_batch_size is None
    assert (await server.service.register(server.job))[1] is False
    with pytest.raises(PolicyNotInstalledError):
        await server.store.read(differences, server.job_id)
    await server.discard(running)
    packages.install("latest", "my_policy", EXAMPLE)
    assert (await server.suggest()).batch_size == 16
    assert await server.differences() == []


async def test_job_with_a_missing_policy_is_neither_registered_nor_imported(
    packages: Packages, server: JobService
) -> None:
    await server.reach(await server.suggest())
    other = server.job.model_copy(update={"job_id": f"{server.job_id}-2"})
    copy = renamed(await exported(server.store, server.job_id), other.job_id)
    packages.uninstall("latest")
    with pytest.raises(PolicyNotInstalledError, match="which has gp_voi and zeus"):
        await server.service.register(other)
    with pytest.raises(PolicyNotInstalledError):
        await import_lines(server.store, copy)
    packages.install("latest", "my_policy", EXAMPLE)
    await import_lines(server.store, copy)
    assert await server.store.read(differences, other.job_id) == []


def test_refusal_over_http_names_the_field(any_server: ServerProcess) -> None:
    job = jobs.job(**{**jobs.THREE_SIZES, "job_id": None, "policy": "nobodys"})
    refused = httpx.post(f"{any_server.url}/jobs", json=job)
    assert refused.status_code == 422
    assert [error["field"] for error in refused.json()["errors"]] == ["policy"]
    assert "entry point group zeus_plugins.policies" in refused.json()["message"]


@pytest.mark.parametrize(
    ("source", "value", "told"),
    [
        ("import nothing_of_this_name", "POLICY", "cannot be loaded, ModuleNotFoundError: No module named"),
        (EXAMPLE, "suggest", "is no bso_server.policies.Policy"),
        (EXAMPLE.replace('version="1"', 'version=""'), "POLICY", "with a version"),
    ],
)
def test_unusable_policy_states_the_cause(packages: Packages, source: str, value: str, told: str) -> None:
    packages.install("broken", "my_policy", source, value)
    assert told in (find("my_policy").missing or "")


def test_two_packages_with_the_same_policy_name_are_reported(packages: Packages) -> None:
    packages.install("one", "my_policy", EXAMPLE)
    packages.install("two", "my_policy", EXAMPLE)
    assert "(one and two)" in (find("my_policy").missing or "")


async def test_policy_suggesting_an_unknown_size_is_named_in_the_error(packages: Packages, tmp_path: Path) -> None:
    source = EXAMPLE.replace("Suggestion(untried[0],", "Suggestion(untried[0] + 1,")
    packages.install("wrong", "my_policy", source)
    async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}", policy="my_policy") as server:
        with pytest.raises(ValueError, match="policy my_policy suggests 17, which is not one of the job's"):
            await server.suggest()


def test_misspelt_policy_name_gets_a_suggestion() -> None:
    assert "did you mean 'gp_voi'?" in (find("gp_vio").missing or "")
    with pytest.raises(ValueError, match="String should match pattern"):
        JobSpec(job_id_prefix="job", batch_sizes=(8,), default_batch_size=8, policy="my policy")
