"""Webhooks: messages about news only, to real receivers that fail, hang and come back, and that no report waits for."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from bso_server.errors import UnknownWebhookError
from bso_server.service import webhooks as webhooks_module
from bso_server.service.webhooks import DEFAULT_EVENTS, EVENTS, Message, NotAcceptedError, Webhooks, body_of
from bso_server.storage.store import Store
from bso_server.storage.webhooks import Webhook
from tests.support.jobs import job
from tests.support.servers import ServerProcess, bso_server
from tests.support.service import JobService, job_service, result
from tests.support.wire import begin
from zeus_plugins.protocol import GP_VOI, SavingsWord

# Three sizes, of which 16 is the default. Costs in joules after 4 epochs.
COSTS_J = {8: 900.0, 16: 400.0, 32: 160.0}
WOBBLE = (1.0, 1.02, 0.98, 1.01, 0.99)
WAIT_S = 60.0


class Receiver(ThreadingHTTPServer):
    """A receiver on this machine; `answer` is called for each message, and `status` is its usual answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.messages: list[tuple[dict[str, str], bytes]] = []
        self.status = 204
        self.answer: Callable[[Any], object] = lambda handler: reply(handler, self.status)
        self.arrived, self.end = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/T0/secret-path"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.messages]

    def taken(self) -> list[tuple[str, str | None]]:
        """Events and ids of the jobs of the messages since the last call."""
        found = [(each["event"], each["job_id"]) for each in self.bodies]
        self.messages.clear()
        return found


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.messages.append((dict(self.headers), body))
        self.server.arrived.set()
        with suppress(OSError):
            self.server.answer(self)

    def log_message(self, *_: object) -> None:
        pass


def reply(handler: BaseHTTPRequestHandler, status: int, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.end.set()
        server.shutdown()
        thread.join()


@pytest.fixture
async def bso(database_url: str) -> AsyncIterator[JobService]:
    async with job_service(database_url, policy=GP_VOI, mab_seed=1, eta_knob=1.0) as service:
        yield service
        for webhook in await hooks(service).all():
            await hooks(service).remove(webhook.webhook_id)
        await service.service.delete_job(service.job_id)


def hooks(server: JobService) -> Webhooks:
    """The webhooks of a process that has just started."""
    return Webhooks(server.store, clock=lambda: server.now)


async def run(server: JobService, factor: float = 1.0) -> None:
    """Let one recurrence reach the target."""
    trial = await server.suggest()
    cost_j = factor * COSTS_J[trial.batch_size] * WOBBLE[trial.trial_number % len(WOBBLE)]
    await server.report(trial, cost_j=cost_j / 4, epoch=1)
    await server.report(trial, cost_j=cost_j, epoch=4, metric=0.95)


async def deliver(server: JobService, minutes: float = 1) -> None:
    server.now += timedelta(minutes=minutes)
    await hooks(server).deliver()


async def only(server: JobService) -> Webhook:
    (webhook,) = await hooks(server).all()
    return webhook


def verified(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """As docs/webhooks.md says, with the standard library alone."""
    signed = b".".join([headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body])
    digest = hmac.new(base64.b64decode(secret.split("_")[1]), signed, hashlib.sha256).digest()
    return headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()


async def test_verdict_is_sent_once_and_ended_trials_once_each(bso: JobService, receiver: Receiver) -> None:
    webhook = await hooks(bso).add(receiver.url, ["verdict", "trial_ended"])
    words, found = [], list[dict[str, Any]]()
    for _ in range(24):
        await run(bso)
        await deliver(bso)
        await deliver(bso)  # without news
        words.append((await bso.show()).savings.word)
        for headers, body in receiver.messages:
            assert verified(webhook.secret, headers, body)
            assert not verified(webhook.secret, headers, body.replace(b"}", b" }"))
            assert headers["webhook-id"] == json.loads(body)["id"]
            assert int(headers["webhook-timestamp"]) == int(bso.now.timestamp()) - 60
        found += receiver.bodies
        receiver.messages.clear()
    assert words[-1] is SavingsWord.SAVES
    ended = [each["data"]["trial_number"] for each in found if each["event"] == "trial_ended"]
    assert ended == list(range(1, 25))
    changes = [
        (before, word) for before, word in zip([SavingsWord.NOT_SHOWN, *words], words, strict=False) if before != word
    ]
    verdicts = [each for each in found if each["event"] == "verdict"]
    assert [(each["data"]["before"], each["data"]["word"]) for each in verdicts] == changes
    assert verdicts[0]["text"].startswith(f"{bso.job_id}: 32 saves ")
    assert len({each["id"] for each in found}) == len(found)
    assert set(found[0]) == {"id", "event", "job_id", "text", "data"}


async def test_state_before_the_webhook_is_no_news(bso: JobService, receiver: Receiver) -> None:
    for _ in range(20):
        await run(bso)
    bso.wait(1)
    await hooks(bso).add(receiver.url, EVENTS)
    await deliver(bso)
    assert receiver.taken() == []
    await run(bso)
    await deliver(bso)
    assert receiver.taken() == [("trial_ended", bso.job_id)]


async def test_stuck_job_is_told_again_only_after_it_was_not(bso: JobService, receiver: Receiver) -> None:
    await hooks(bso).add(receiver.url)
    for _ in range(5):
        await bso.report(await bso.suggest(), cost_j=900.0, epoch=10, metric=0.3)
        await deliver(bso)
    assert receiver.bodies[0]["data"]["advice"] == (await bso.show()).stuck
    assert receiver.taken() == [("stuck", bso.job_id)]
    await run(bso)
    await deliver(bso)
    assert receiver.taken() == []


async def test_change_of_cost_is_told_once_per_change(bso: JobService, receiver: Receiver) -> None:
    await hooks(bso).add(receiver.url, ["drift"])
    factors = [1.0] * 16 + [2.0] * 16
    for factor in factors:
        await run(bso, factor)
        await deliver(bso)
    changes = [each["data"] for each in receiver.bodies]
    assert [each["batch_size"] for each in changes] == sorted({each["batch_size"] for each in changes}, reverse=True)
    assert changes[0]["trial_number"] > 16
    assert changes[0]["change"] == pytest.approx(1.0, abs=0.1)
    assert "cost 100% more" in re.sub(r"\b(9\d|10\d)%", "100%", receiver.bodies[0]["text"])


async def test_later_runs_are_compared_with_both_changed_ones_despite_a_busy_run(
    bso: JobService, receiver: Receiver
) -> None:
    await hooks(bso).add(receiver.url, ["drift"])
    busy_j = 205.0
    costs_j = [100.0, 103.0, 98.0, 101.0, 99.0, 200.0, busy_j, 202.0, 201.0, 199.0, 100.0, 101.0]
    for number, cost_j in enumerate(costs_j):
        trial = await bso.offline(16, f"key-{number}")
        waited_share = 0.5 if cost_j == busy_j else None
        report = result(trial, cost_j=cost_j, metric=0.95, epoch=5, waited_share=waited_share)
        await bso.service.reports.record_report(report)
        await deliver(bso)
    changes = [(each["data"]["trial_number"], round(each["data"]["change"], 1)) for each in receiver.bodies]
    assert changes == [(8, 1.0), (12, -0.5)]


@pytest.mark.storage
async def test_failed_messages_are_repeated_with_equal_ids_across_restarts(
    bso: JobService, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await hooks(bso).add(receiver.url, ["trial_ended"])
    receiver.status = 500
    for _ in range(3):
        await run(bso)
    await deliver(bso)
    first = receiver.bodies[0]["id"]
    webhook = await only(bso)
    assert webhook.last_error == "the receiver answered 500"
    await deliver(bso, minutes=0.25)  # too soon
    assert len(receiver.messages) == 1
    waits = list[timedelta]()
    for _ in range(12):
        before = bso.now = (await only(bso)).next_attempt_at or bso.now
        await deliver(bso, minutes=0)
        waits.append(((await only(bso)).next_attempt_at or before) - before)
    assert waits[0] == timedelta(seconds=30)
    assert waits == sorted(waits)
    assert waits[-1] == timedelta(hours=1)
    assert {each["id"] for each in receiver.bodies} == {first}
    receiver.messages.clear()
    receiver.status = 204
    await deliver(bso, minutes=60)
    assert [each["data"]["trial_number"] for each in receiver.bodies] == [1, 2, 3]
    assert receiver.bodies[0]["id"] == first
    assert (await only(bso)).failing_since is None
    assert len([line for line in caplog.messages if "is tried again" in line]) == 1
    assert "secret-path" not in caplog.text


async def test_webhook_is_switched_off_after_three_days_and_on_by_a_test(bso: JobService, receiver: Receiver) -> None:
    webhook = await hooks(bso).add(receiver.url, ["trial_ended"])
    receiver.status = 404
    await run(bso)
    await deliver(bso)
    await deliver(bso, minutes=71 * 60)
    assert (await only(bso)).next_attempt_at is not None
    await deliver(bso, minutes=60 + 1)
    assert (await only(bso)).next_attempt_at is None
    receiver.messages.clear()
    await deliver(bso, minutes=60)
    assert receiver.messages == []
    with pytest.raises(NotAcceptedError, match="answered 404"):
        await hooks(bso).test(webhook.webhook_id)
    receiver.status = 200
    await hooks(bso).test(webhook.webhook_id)
    receiver.messages.clear()
    await deliver(bso)
    assert receiver.taken() == [("trial_ended", bso.job_id)]


async def test_receiver_with_a_limit_of_messages_gets_all_in_the_end(bso: JobService, receiver: Receiver) -> None:
    await hooks(bso).add(receiver.url, ["trial_ended"])
    for _ in range(5):
        await run(bso)
    accepted = list[int]()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        is_accepted = len(receiver.messages) % 2
        if is_accepted:
            accepted.append(receiver.bodies[-1]["data"]["trial_number"])
        reply(handler, 204 if is_accepted else 429)

    receiver.answer = answer
    for _ in range(5):
        await deliver(bso, minutes=24 * 60)
    assert accepted == [1, 2, 3, 4, 5]
    assert (await only(bso)).next_attempt_at is not None


async def test_refused_message_repeats_no_accepted_message_of_its_job(bso: JobService, receiver: Receiver) -> None:
    await hooks(bso).add(receiver.url, ["verdict", "drift"])
    for factor in [1.0] * 20 + [2.0] * 6:
        await run(bso, factor)
    receiver.answer = lambda handler: reply(handler, 204 if receiver.bodies[-1]["event"] == "verdict" else 400)
    for _ in range(3):
        await deliver(bso, minutes=60)
    assert [each["event"] for each in receiver.bodies] == ["verdict", "drift", "drift", "drift"]


async def test_delivery_may_take_longer_than_a_request(bso: JobService, receiver: Receiver) -> None:
    await hooks(bso).add(receiver.url, ["trial_ended"])
    await run(bso)
    bso.now += timedelta(minutes=1)
    await Webhooks(Store(bso.store._database, patience_s=1e-6), clock=lambda: bso.now).deliver()
    assert receiver.taken() == [("trial_ended", bso.job_id)]


@pytest.mark.storage
async def test_two_processes_and_a_killed_one_deliver_each_message(bso: JobService, receiver: Receiver) -> None:
    await hooks(bso).add(receiver.url, ["trial_ended"])
    await run(bso)
    receiver.answer = lambda _: receiver.end.wait()
    killed = asyncio.create_task(hooks(bso).deliver())
    await asyncio.to_thread(receiver.arrived.wait, WAIT_S)
    killed.cancel()
    with suppress(asyncio.CancelledError):
        await killed
    receiver.answer = lambda handler: reply(handler, 200)
    first = receiver.bodies[0]["id"]
    receiver.messages.clear()
    await deliver(bso)
    assert receiver.messages == []  # The killed process may still be delivering.
    bso.now += timedelta(minutes=5)
    await asyncio.gather(hooks(bso).deliver(), hooks(bso).deliver())
    assert [each["id"] for each in receiver.bodies] == [first]


@pytest.mark.storage
async def test_weekly_total_follows_a_week_with_runs_only(bso: JobService, receiver: Receiver) -> None:
    await hooks(bso).add(receiver.url)
    await run(bso)
    with_wrong_numbers = await bso.suggest()
    await bso.report(with_wrong_numbers, cost_j=1e9, epoch=4, metric=0.95)
    await bso.discard(with_wrong_numbers)
    await deliver(bso)
    assert receiver.taken() == []
    await deliver(bso, minutes=7 * 24 * 60)
    total, text = receiver.bodies[0]["data"], receiver.bodies[0]["text"]
    assert text.startswith("Week from 2025-12-29: 1 run of 1 job ended, 1 reached the target; ")
    assert ". Of all jobs, 0 save and 0 lose; " in text
    assert receiver.taken() == [("weekly", None)]
    assert (total["week"], total["trials"], total["reached"]) == ("2025-12-29", 1, 1)
    assert total["energy_j"] == pytest.approx((await bso.show()).trials[0].energy_j)
    await deliver(bso, minutes=1)
    await deliver(bso, minutes=7 * 24 * 60)
    assert receiver.taken() == []


@pytest.mark.storage
async def test_deleted_jobs_and_removed_webhooks_leave_nothing(bso: JobService, receiver: Receiver) -> None:
    webhook = await hooks(bso).add(receiver.url, EVENTS)
    await run(bso)
    await deliver(bso)
    assert receiver.taken() == [("trial_ended", bso.job_id)]
    await bso.service.delete_job(bso.job_id)
    await bso.service.register(bso.job)
    await run(bso)
    await deliver(bso)
    assert receiver.taken() == [("trial_ended", bso.job_id)]
    await hooks(bso).remove(webhook.webhook_id)
    with pytest.raises(UnknownWebhookError):
        await hooks(bso).remove(webhook.webhook_id)
    await run(bso)
    await deliver(bso)
    assert receiver.messages == []


def drip(handler: BaseHTTPRequestHandler) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.05)


def flood(handler: BaseHTTPRequestHandler) -> None:
    reply(handler, 200)
    while True:
        handler.wfile.write(b"x" * 65536)


BAD_ANSWERS: dict[str, tuple[Callable[[Any], object], str | None]] = {
    "never": (lambda handler: handler.server.end.wait(), r"no answer within 0\.5 s"),
    "dripping": (drip, r"no answer within 0\.5 s"),
    "redirect": (lambda handler: reply(handler, 307, location=handler.path), "answered 307"),
    "no HTTP": (lambda handler: handler.wfile.write(b"220 mail\r\n\r\n"), "RemoteProtocolError"),
    "closed": (lambda _: None, "RemoteProtocolError"),
    "huge": (flood, None),
}


@pytest.mark.parametrize("answer", BAD_ANSWERS)
async def test_bad_answers_end_at_the_deadline(
    answer: str, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks_module, "DEADLINE_S", 0.5)
    receiver.answer, error = BAD_ANSWERS[answer]
    async with job_service(f"sqlite:///{tmp_path / 'bso.sqlite3'}") as server:
        webhook = await hooks(server).add(receiver.url)
        webhooks_module._tls()
        if error is None:
            await hooks(server).test(webhook.webhook_id)
        else:
            with pytest.raises(NotAcceptedError, match=error):
                await hooks(server).test(webhook.webhook_id)
    assert len(receiver.messages) == 1


def test_hanging_receiver_delays_no_report(
    new_database: str, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_BSO_REAP_INTERVAL_S", "0.1")
    receiver.answer = lambda _: receiver.end.wait()
    server = ServerProcess(new_database, tmp_path / "server.log")
    try:
        server.start()
        assert bso_server("webhook", "add", receiver.url, "--events", "trial_ended", "--database-url", new_database)
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
            job_id = http.post("/jobs", json=job()).raise_for_status().json()["job_id"]
            report = {"time": 5.0, "energy": 500.0, "metric": 0.95, "current_epoch": 2}
            http.post("/report", json={**begin(http, job_id), **report}).raise_for_status()
            assert receiver.arrived.wait(WAIT_S)
            trial = begin(http, job_id)
            for epoch in range(1, 6):
                http.post("/report", json={**trial, **report, "metric": 0.1, "current_epoch": epoch}).raise_for_status()
            # All these answers came while the first message was still waiting for its own.
            assert len(receiver.messages) == 1
    finally:
        server.kill()
    assert "secret-path" not in server.log.read_text()


def test_slack_and_teams_take_text_literally() -> None:
    message = Message("verdict", "a", "<!channel> *a* & [b](http://c)", {}, ())
    slack = json.loads(body_of(message, "msg_1", "slack"))
    assert slack == {"text": "&lt;!channel&gt; *a* &amp; [b](http://c)", "mrkdwn": False}
    teams = json.loads(body_of(message, "msg_1", "teams"))
    (attachment,) = teams["attachments"]
    assert (teams["type"], attachment["contentType"]) == ("message", "application/vnd.microsoft.card.adaptive")
    (block,) = attachment["content"]["body"]
    assert block["inlines"] == [{"type": "TextRun", "text": message.text}]


def test_commands_add_list_test_and_remove(new_database: str, receiver: Receiver) -> None:
    def command(*arguments: str) -> tuple[int, str, str]:
        done = bso_server("webhook", *arguments, "--database-url", new_database)
        return done.returncode, done.stdout, done.stderr

    bso_server("db", "upgrade", "--database-url", new_database)
    assert command("list") == (0, "no webhooks\n", "")
    status, secret, said = command("add", receiver.url)
    assert (status, len(base64.b64decode(secret.strip().removeprefix("whsec_")))) == (0, 32)
    webhook_id = said.split()[1]
    (listed,) = json.loads(command("list", "--json")[1])
    assert listed["id"] == webhook_id
    assert (listed["host"], listed["state"], listed["events"]) == ("127.0.0.1", "ok", ",".join(DEFAULT_EVENTS))
    everything = command("list")[1] + json.dumps(listed)
    assert "secret-path" not in everything
    assert secret.strip() not in everything
    assert command("test", webhook_id)[0] == 0
    assert verified(secret.strip(), *receiver.messages[0])
    receiver.status = 403
    assert command("test", webhook_id) == (1, "", f"bso-server: webhook {webhook_id}: the receiver answered 403\n")
    for wrong in (["ftp://a/b"], ["https:///b"], ["https://a/\nb"], [receiver.url, "--events", "verdict,nothing"]):
        status, output, said = command("add", *wrong)
        assert (status, output) == (1, "")
        assert said.startswith(("bso-server: a webhook's URL begins with https://", "bso-server: events are verdict, "))
    assert command("remove", webhook_id) == (0, f"webhook {webhook_id} is removed\n", "")
    assert command("remove", webhook_id)[0] == 1
