"""A database and an export that version 0.1.0 wrote: what they show, and decisions as that version made them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bso_server.core.access import Caller
from bso_server.service import queries
from bso_server.service.batch_size_service import BatchSizeService
from bso_server.service.commands import Commands
from bso_server.service.messages import JobExport
from bso_server.service.queries import JobReader
from bso_server.service.security import Authenticator
from bso_server.service.tokens import Tokens
from bso_server.storage.database import open_database
from bso_server.storage.store import Store
from tests.support.service import exported, pieces_of
from zeus_plugins.protocol import Heartbeat, OfflineTrial, TrainingResult

FIXTURES = Path(__file__).parent / "fixtures" / "v0_1"
EXPECTED = json.loads((FIXTURES / "database_expected.json").read_text())
# The jobs, and what their policies play when nothing is to be learned.
BEST = {"old-zeus": 16, "old-gp": 256, "old-pruning": 32}


class Old:
    """The service on what version 0.1.0 left, at the instant at which that version was asked."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reader = JobReader(store)
        self.service = BatchSizeService(store, Commands(clock=lambda: datetime.fromisoformat(EXPECTED["now"])))


def on_old_database(tmp_path: Path, use: Callable[[Old], Awaitable[None]]) -> None:
    path = tmp_path / "bso.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FIXTURES / "database.sql").read_text())

    async def run() -> None:
        store = Store(open_database(f"sqlite:///{path}"))
        try:
            await store.migrate()
            await use(Old(store))
        finally:
            await store.close()

    asyncio.run(run())


def as_json(message: Any) -> Any:
    """A message without what later versions add: that no training has resumed since the migration, expected costs."""
    return json.loads(message.model_dump_json(), object_pairs_hook=lambda pairs: dict(set_aside(pairs)))


def set_aside(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [pair for pair in pairs if pair != ("lease_epoch", 1) and not pair[0].startswith("expected_cost")]


def without_words(said: dict[str, Any]) -> dict[str, Any]:
    """An answer without its reason and message, whose words may change."""
    return {name: value for name, value in said.items() if name not in {"reason", "message"}}


def without_owner(said: dict[str, Any]) -> dict[str, Any]:
    """The answer on a job, which belongs to nobody: it is open to all tokens, as all jobs were."""
    assert (said.pop("owner"), said.pop("shared")) == (None, False)
    return said


def test_it_is_shown_as_before(tmp_path: Path) -> None:
    async def use(old: Old) -> None:
        listed = as_json(await old.reader.read(queries.list_jobs, limit=None))
        assert [without_owner(job) for job in listed.pop("jobs")] == EXPECTED["all_jobs"]["jobs"]
        assert listed == {"next_cursor": EXPECTED["all_jobs"]["next_cursor"]}
        for job_id, best in BEST.items():
            before = EXPECTED["jobs"][job_id]
            shown = as_json(await old.reader.read(queries.show_job, job_id))
            # The best size was that of the lowest mean cost, however few runs that was of.
            assert {name: shown[name] for name in before["show"]} == before["show"] | {"best_batch_size": best}
            assert shown["trial_count"] == sum(shown["trial_states"].values()) == len(shown["trials"])
            assert as_json(await old.reader.read(queries.list_arms, job_id)) == before["arms"]
            assert as_json(await old.reader.read(queries.list_power_profiles, job_id)) == before["power_profiles"]
            export = before.get("export") or json.loads((FIXTURES / "export.json").read_text())
            kept = without_owner(as_json(await exported(old.store, job_id)))
            # The numbers behind its decisions stood in no column then, nor did how unevenly epochs cost.
            for column in ("decision", "cost_deviations_j2"):
                assert {trial.pop(column) for trial in kept["trials"]} == {None}
            assert kept == export

    on_old_database(tmp_path, use)


def test_its_token_is_good(tmp_path: Path) -> None:
    async def use(old: Old) -> None:
        tokens = Tokens(old.store)
        assert [(token.token_id, token.name, sorted(token.scopes)) for token in await tokens.all()] == [
            (token["token_id"], token["name"], token["scopes"]) for token in EXPECTED["tokens"]
        ]
        caller = await Authenticator(tokens).identify(f"Bearer {EXPECTED['token']}", "192.0.2.7", "bso.example")
        assert caller.token_id == EXPECTED["tokens"][0]["token_id"]
        for each in (caller, Caller("of another", caller.scopes)):
            trial = await old.service.run(old.service.commands.suggest, "old-gp", caller=each)
            (stored,) = (await old.reader.read(queries.show_job, "old-gp", limit=1)).trials
            assert (stored.trial_number, stored.owner) == (trial.trial_number, each.token_id)
        token, _ = await tokens.rotate(caller.token_id)
        for each in (token, EXPECTED["token"]):
            again = await Authenticator(tokens).identify(f"Bearer {each}", "192.0.2.7", "bso.example")
            assert again.token_id == caller.token_id

    on_old_database(tmp_path, use)


def test_the_next_decisions_are_those_that_version_0_1_0_would_have_made(tmp_path: Path) -> None:
    async def use(old: Old) -> None:
        for job_id, steps in EXPECTED["next"].items():
            for step in steps:
                trial = await old.service.run(old.service.commands.suggest, job_id, step["idempotency_key"])
                assert without_words(as_json(trial)) == without_words(step["dispatch"])
                for report in step["reports"]:
                    await assert_answered(old, report)
        for step in EXPECTED["going_on"]:
            heard = await old.service.run(old.service.commands.heartbeat, Heartbeat.model_validate(step["heartbeat"]))
            assert as_json(heard) == step["heard"]
            await assert_answered(old, step)
        for step in EXPECTED["requests_sent_again"]:
            key, before = step["idempotency_key"], step["dispatch"]
            if before["origin"] == "offline":
                trial = await old.service.run(
                    old.service.commands.record_offline, OfflineTrial.model_validate(before), key
                )
            else:
                trial = await old.service.run(old.service.commands.suggest, before["job_id"], key)
            assert as_json(trial) == before
        for job_id, arms in EXPECTED["arms_after"].items():
            assert as_json(await old.reader.read(queries.list_arms, job_id)) == arms
        export = await exported(old.store, "old-zeus")
        assert export.rng_state == EXPECTED["old_zeus_rng_state_after"]

    on_old_database(tmp_path, use)


async def assert_answered(old: Old, report: dict[str, Any]) -> None:
    answer = await old.service.report(TrainingResult.model_validate(report["result"]))
    assert without_words(as_json(answer)) == without_words(report["answer"])
    assert answer.reason == report["answer"]["reason"]


async def as_it_was_written() -> AsyncIterator[bytes]:
    yield (FIXTURES / "export.json").read_bytes()


@pytest.mark.parametrize("job_id", [None, "old-gp-copy"])
def test_an_export_is_imported(tmp_path: Path, job_id: str | None) -> None:
    async def use(old: Old) -> None:
        export = JobExport.model_validate_json((FIXTURES / "export.json").read_bytes())
        if job_id is None:
            await old.service.delete_job("old-gp")
            await old.service.import_job(as_it_was_written())
        else:
            export = export.renamed(job_id)
            await old.service.import_job(pieces_of(export))
        assert await exported(old.store, job_id or "old-gp") == export
        arms = as_json(await old.reader.read(queries.list_arms, job_id or "old-gp"))
        assert arms == EXPECTED["jobs"]["old-gp"]["arms"]
        # The facts without the caches that the database had: the decisions follow all the same.
        for step in EXPECTED["next"]["old-gp"][:1]:
            trial = await old.service.run(old.service.commands.suggest, job_id or "old-gp")
            assert (trial.batch_size, trial.origin) == (step["batch_size"], step["origin"])

    on_old_database(tmp_path, use)
