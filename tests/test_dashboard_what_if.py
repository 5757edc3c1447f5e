"""The dashboard's page of a job under another η and β, and the replays that a process of their own plays."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from bso_server.core.model import ObservedRun
from bso_server.service.page_views import ReplayState, ReplayView
from bso_server.service.replays import COMMAND, Replays
from bso_server.settings import Settings
from bso_server.simulate import replay
from bso_server.simulate.messages import Answer, Question
from tests.support import dashboards
from tests.support.dashboard_pages import JOB, Page, in_app
from tests.support.histories import make_job
from zeus_plugins.protocol import TrialState


def a_question(eta: float = 1.0, beta: float | None = None, sizes: Sequence[int] = (8, 16)) -> Question:
    """8 is quick and thirsty, 16 is slow and frugal."""
    runs = [ObservedRun(size, TrialState.COMPLETED, 10.0, 100.0 * size, 9e6 / size) for size in sizes for _ in range(3)]
    job = make_job(tuple(sizes), sizes[0]).model_copy(update={"max_power": 1000.0, "eta_knob": 0.0, "policy": "gp_voi"})
    return Question(job=job, runs=tuple(runs), eta=eta, beta=beta)


class TestPage:
    def test_it_says_where_another_size_would_be_the_best(self, new_database: str) -> None:
        async def fill(life: dashboards.Life) -> None:
            # Large sizes are quick and take more power.
            registered = await life.register("job-1", eta_knob=0.2)
            for _ in range(12):
                await life.run(registered, reports_each=False)

        dashboards.filled(new_database, fill)

        async def use(http: httpx.AsyncClient) -> None:
            twin = (await http.get("/ui/jobs/job-1/whatif.json")).json()
            assert (twin["eta"], twin["beta"], twin["replay"]) == (0.2, 2.0, None)
            assert twin["batch_size"] == twin["own_batch_size"]
            for span in twin["best_by_eta"]:
                eta = (span["low"] + span["high"]) / 2
                there = (await http.get("/ui/jobs/job-1/whatif.json", params={"eta": eta})).json()
                assert there["batch_size"] == span["batch_size"]
                least = min(there["means"], key=lambda each: each["cost_j"])
                assert there["bound_j"] == pytest.approx(2 * least["cost_j"])
                cost_j = eta * least["energy_j"] + (1 - eta) * 700 * least["time_s"]
                assert least["cost_j"] == pytest.approx(cost_j)
            none = (await http.get("/ui/jobs/job-1/whatif.json", params={"beta": ""})).json()
            assert (none["beta"], none["bound_j"]) == (None, None)

        in_app(Settings(database_url=new_database), use)

    @pytest.mark.parametrize("beta", [4 / 3, 1e6, 0.00125])
    def test_a_jobs_own_beta_can_be_asked_about(self, new_database: str, beta: float) -> None:
        async def fill(life: dashboards.Life) -> None:
            await life.register("job-1", beta_knob=beta)

        dashboards.filled(new_database, fill)

        async def use(http: httpx.AsyncClient) -> None:
            address = "/ui/jobs/job-1/whatif"
            page = Page((await http.get(address)).raise_for_status().text)
            (twin,) = [link for link in page.links if "whatif.json" in link]
            found = (await http.get(urljoin(address, twin))).raise_for_status().json()
            assert found["beta"] == pytest.approx(beta)

        in_app(Settings(database_url=new_database), use)

    @pytest.mark.parametrize("query", ["eta=2", "eta=nan", "eta=x", "beta=0", "beta=-1", "beta=nan", "replay=-1"])
    def test_what_is_no_knob_is_refused(self, dashboard_database: str, query: str) -> None:
        async def use(http: httpx.AsyncClient) -> None:
            assert (await http.get(f"/ui/jobs/{JOB}/whatif?{query}")).status_code == 422

        in_app(Settings(database_url=dashboard_database), use)

    def test_before_a_run_has_reached_the_target_there_is_nothing_to_weigh(self, dashboard_database: str) -> None:
        async def use(http: httpx.AsyncClient) -> None:
            page = Page((await http.get("/ui/jobs/llama-sft/whatif")).raise_for_status().text)
            assert "Nothing is known until a run has reached the target" in page.text
            assert (await http.get("/ui/jobs/unknown/whatif?replay=1")).status_code == 404

        in_app(Settings(database_url=dashboard_database), use)

    @pytest.mark.slow
    def test_a_replay_is_played_once_and_remembered(self, dashboard_database: str) -> None:
        async def use(http: httpx.AsyncClient) -> None:
            address = f"/ui/jobs/{JOB}/whatif?eta=0.1&beta=1.5&replay=28"
            tag = ""
            while True:
                answer = await http.get(address, headers={"If-None-Match": tag})
                if answer.status_code == 200:
                    tag = answer.headers["etag"]
                    page = Page(answer.text)
                    if "Comes to" in page.text:
                        break
                    assert "is being played anew" in page.text
                await asyncio.sleep(0.05)
            twin = (await http.get(address.replace("whatif?", "whatif.json?"))).json()["replay"]
            assert (twin["state"], twin["event"]) == ("done", 28)
            played = twin["replayed"]
            assert (played["own"]["eta"], played["other"]["eta"], played["other"]["beta"]) == (0.5, 0.1, 1.5)
            assert (played["recurrences"], played["default_batch_size"]) == (replay.RECURRENCES, 64)
            assert played["own"]["batch_size"] == 256
            assert "With these, 50 recurrences would take" in page.text
            assert (await http.get(address, headers={"If-None-Match": tag})).status_code == 304

        in_app(Settings(database_url=dashboard_database), use)


class TestReplay:
    def test_it_plays_the_job_as_it_is_and_as_it_could_be(self) -> None:
        found = replay.answer(a_question(), clock=iter(range(1000)).__next__).replayed
        assert found is not None
        # A second goes by with each job: the first look at the clock sets the end.
        assert found.times == replay.BUDGET_S + 1
        assert (found.own.batch_size, found.other.batch_size) == (8, 16)
        assert found.own.time_s < found.other.time_s
        assert found.other.energy_j < found.own.energy_j
        assert found.default_energy_j == pytest.approx(replay.RECURRENCES * 9e6 / 8)

    def test_what_cannot_be_played_is_said(self) -> None:
        nothing = a_question().model_copy(update={"runs": ()})
        assert "no trial has reached the target yet" in str(replay.answer(nothing).refused)
        many = a_question(sizes=range(8, 8 + replay.MAX_SIZES + 1))
        assert "takes at most 128" in str(replay.answer(many).refused)
        job = many.job.model_copy(update={"policy": "unknown-policy"})
        unknown = a_question().model_copy(update={"job": job})
        assert "unknown-policy" in str(replay.answer(unknown).refused)


async def until_played(replays: Replays, key: tuple[str, int], question: Question) -> ReplayView:
    async def ask() -> Question:
        return question

    while (view := await replays.look(key, ask)).state in {ReplayState.RUNNING, ReplayState.BUSY}:
        await asyncio.sleep(0.01)
    return view


class TestProcess:
    """The process of a replay, which is given its bounds."""

    def test_one_is_played_at_a_time(self, tmp_path: Path) -> None:
        began = tmp_path / "began"
        answer = Answer(refused="as asked").model_dump_json()
        script = f"open({str(began)!r}, 'a').write('x'); import sys; sys.stdin.read(); print({answer!r})"

        async def run() -> None:
            replays = Replays([sys.executable, "-c", script])
            views = await asyncio.gather(
                *(until_played(replays, key, a_question()) for key in [("a", 1), ("b", 2), ("a", 1)])
            )
            assert [(view.event, view.reason) for view in views] == [(1, "as asked"), (2, "as asked"), (1, "as asked")]
            await replays.close()

        asyncio.run(run())
        assert began.read_text() == "xx"

    def test_it_ends_with_the_server(self, tmp_path: Path) -> None:
        identity = tmp_path / "pid"
        script = f"import os, time; open({str(identity)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(600)"

        async def run() -> None:
            replays = Replays([sys.executable, "-c", script])
            waiting = asyncio.create_task(until_played(replays, ("a", 1), a_question()))
            while not (identity.exists() and identity.read_text().endswith(".")):
                await asyncio.sleep(0.01)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await replays.close()

        asyncio.run(run())
        with pytest.raises(ProcessLookupError):
            os.kill(int(identity.read_text().removesuffix(".")), 0)

    def test_it_is_ended_when_it_takes_too_long(self) -> None:
        async def run() -> None:
            replays = Replays([sys.executable, "-c", "import time; time.sleep(600)"], limit_s=0.2)
            view = await until_played(replays, ("a", 1), a_question())
            assert (view.state, view.reason) == (ReplayState.FAILED, "it took more than 0.2 s, and was ended")
            await replays.close()

        asyncio.run(run())

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such call")
    def test_a_sandbox_may_refuse_to_let_it_be_nice(self) -> None:
        script = (
            "import os, bso_server.simulate.replay as replay\n"
            "def refuse(by): raise PermissionError\n"
            "os.nice = refuse\n"
            "replay.main()"
        )
        nothing = a_question().model_copy(update={"runs": ()})

        async def run() -> None:
            replays = Replays([*COMMAND[:1], "-c", script])
            view = await until_played(replays, ("a", 1), nothing)
            assert "no trial has reached the target yet" in str(view.reason)
            await replays.close()

        asyncio.run(run())

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
    def test_memory_is_bounded(self) -> None:
        script = (
            "import runpy, bso_server.simulate.replay as replay\n"
            "replay.answer = lambda question: bytearray(replay.MAX_MEMORY_BYTES)\n"
            "replay.main()"
        )

        async def run() -> None:
            replays = Replays([*COMMAND[:1], "-c", script])
            view = await until_played(replays, ("a", 1), a_question())
            assert view.reason == "it would take more than 1 GiB of memory"
            await replays.close()

        asyncio.run(run())
