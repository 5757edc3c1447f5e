"""Webhooks: messages to Slack, Teams or a program when there is news of a job; no request waits for them.

Messages are not stored. For each webhook, the database stores the state of each job that the receiver knows, and
changes it once the receiver has accepted a message about the job. Until then, the server sends the message again, with
the same id.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import html
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from bso_server.core.drift import drift_of
from bso_server.core.model import TrialRecord
from bso_server.errors import UnknownJobError, UnknownWebhookError
from bso_server.service import reading
from bso_server.service.commands import utc_now
from bso_server.service.health import TotalsReader
from bso_server.service.loading import known_job
from bso_server.storage import queries
from bso_server.storage import webhooks as rows
from bso_server.storage.rows import StoredJob
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from bso_server.storage.webhooks import KnownJob, Webhook
from zeus_plugins.protocol import SavingsWord, is_busy, joules_in_words, printable

if TYPE_CHECKING:
    import ssl

EVENTS = ("verdict", "stuck", "drift", "weekly", "trial_ended")
DEFAULT_EVENTS = EVENTS[:4]
FORMATS = ("json", "slack", "teams")

DEADLINE_S = 10.0
"""Seconds that a receiver has for a message, from the look-up of its name to the status of its answer."""
_DELIVERY_S = 60.0
# Longer than a delivery with its last message.
_CLAIM = timedelta(seconds=2 * _DELIVERY_S)
_SHORTEST_WAIT, _LONGEST_WAIT = timedelta(seconds=30), timedelta(hours=1)
GIVEN_UP = timedelta(days=3)
"""Time of failures after which a webhook is switched off."""
_WEEK = timedelta(days=7)
_JOBS_AT_ONCE, _ENDS_AT_ONCE = 50, 50
# A run is compared with earlier runs among this number of events before the news.
_COMPARED_EVENTS = 400

logger = logging.getLogger("bso_server")


Save: TypeAlias = Callable[[Transaction], object]


class NotAcceptedError(Exception):
    """The receiver has not accepted a message; the text says why."""


class Message(NamedTuple):
    """A message; `key` identifies its news, and stays the same when the message is sent again."""

    event: str
    job_id: str | None
    text: str
    data: dict[str, Any]
    key: Sequence[object]

    def id_for(self, webhook_id: str) -> str:
        """Return the message's id for a webhook."""
        parts = json.dumps([webhook_id, self.event, self.job_id, *map(str, self.key)])
        return f"msg_{hashlib.sha256(parts.encode()).hexdigest()[:32]}"


def body_of(message: Message, message_id: str, kind: str) -> bytes:
    """Return a message in one of `FORMATS`, as JSON."""
    text = printable(message.text)
    body: dict[str, Any] = {"id": message_id, **message._asdict(), "text": text}
    del body["key"]
    if kind == "slack":
        # Without this, Slack would take characters of a job's id for formatting, mentions and links.
        body = {"text": html.escape(text, quote=False), "mrkdwn": False}
    elif kind == "teams":
        # Unlike a TextBlock, a TextRun takes no Markdown.
        block = {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text}]}
        schema = "http://adaptivecards.io/schemas/adaptive-card.json"
        card = {"$schema": schema, "type": "AdaptiveCard", "version": "1.4", "body": [block]}
        content_type = "application/vnd.microsoft.card.adaptive"
        body = {
            "type": "message",
            "attachments": [{"contentType": content_type, "contentUrl": None, "content": card}],
        }
    return json.dumps(body).encode()


def signature_of(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature of a message, as in Standard Webhooks 1: HMAC-SHA256 of id, timestamp and body."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"


def news_of(
    transaction: Transaction, webhook: Webhook, job_id: str, known: KnownJob | None
) -> list[tuple[Message | None, KnownJob]]:
    """Return the messages about a job since its `known` state, each with the state to save once it is accepted.

    Each state is saved separately, so that a receiver that limits messages per minute gets all messages in the end. A
    job that is older than the webhook begins without messages.

    Raises:
        UnknownJobError: The job was deleted.
    """
    stored = known_job(transaction, job_id)
    view = reading.show_job(transaction, job_id, limit=1)
    word, is_stuck = view.savings.word, view.stuck is not None
    if known is None and stored.created_at < webhook.created_at:
        return [(None, KnownJob(job_id, webhook.webhook_id, stored.event_count, word, is_stuck))]
    then = known = known or KnownJob(job_id, webhook.webhook_id)
    steps: list[tuple[Message | None, KnownJob]] = []

    def add(event: str, text: str, data: dict[str, Any], *key: object) -> None:
        message = Message(event, job_id, f"{job_id}: {text}", data, (stored.created_at, *key))
        steps.append((message if event in webhook.events else None, then))

    if word != known.word:
        then = replace(then, word=word)
        data = {"before": known.word, **view.savings.model_dump(mode="json")}
        add("verdict", f"{view.savings.claim}. {view.savings.evidence}".strip(), data, known.event, word)
    then = replace(then, is_stuck=is_stuck)
    if view.stuck is not None and not known.is_stuck:
        add("stuck", f"stuck, {view.stuck}.", {"advice": view.stuck}, known.event)
    level_event, drift = _drift(transaction, stored, known)
    then = replace(then, level_event=level_event)
    if drift is not None:
        size, change = drift["batch_size"], drift["change"]
        text = f"the last two runs at batch size {size} cost {abs(change):.0%} {'more' if change > 0 else 'less'}"
        add("drift", f"{text} than the runs before them.", drift, level_event)
    ended: list[TrialRecord] = []
    if "trial_ended" in webhook.events:
        ended = queries.ended_after(transaction, job_id, known.event, _ENDS_AT_ONCE)
    for trial in ended:
        then = replace(then, event=trial.ended_event or known.event)
        trial_view = reading.trial_view(stored.registration, trial)
        cost = "" if trial_view.cost_j is None else f", cost {joules_in_words(trial_view.cost_j)}"
        text = f"run {trial.trial_number} at batch size {trial.batch_size} {trial.state.replace('_', ' ')}{cost}."
        add("trial_ended", text, trial_view.model_dump(mode="json"), trial.trial_number, trial.ended_event)
    return steps if len(ended) == _ENDS_AT_ONCE else [*steps, (None, replace(then, event=stored.event_count))]


def _drift(transaction: Transaction, stored: StoredJob, known: KnownJob) -> tuple[int, dict[str, Any] | None]:
    """Return the event of the first run that later ones are compared with, and the latest unknown change or None."""
    level, found = max(known.level_event, stored.revised_event), None
    runs = queries.completed_runs(transaction, stored.job_id, since=max(level, known.event - _COMPARED_EVENTS))
    runs = [run for run in runs if not is_busy(run.waited_share)]
    for number, run in enumerate(runs, 1):
        before = [each for each in runs[:number] if each.ended_event >= level]
        change = drift_of(stored.registration, before) if run.ended_event > known.event else None
        if change is not None:
            level = [each for each in before if each.batch_size == run.batch_size][-2].ended_event
            found = {"batch_size": run.batch_size, "change": change, "trial_number": run.trial_number}
    return level, found


class Webhooks:
    """The use cases of webhooks, and the delivery of their messages; `clock` returns the present instant."""

    def __init__(self, store: Store, clock: Callable[[], datetime] = utc_now) -> None:
        # Patient, because learning thousands of runs of a job takes seconds.
        self._store = store.patient()
        self._clock = clock

    async def add(self, url: str, events: Iterable[str] = DEFAULT_EVENTS, kind: str = "json") -> Webhook:
        """Add a webhook with a new secret, which signs its messages.

        Raises:
            ValueError: The URL is no address of a web server, or an event or the format is unknown.
        """
        parts, chosen = urlsplit(url), list(dict.fromkeys(events))
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
            raise ValueError("a webhook's URL begins with https:// or http://, and a host follows")
        if kind not in FORMATS or not chosen or not set(chosen) <= set(EVENTS):
            raise ValueError(f"events are {', '.join(EVENTS)}; formats are {', '.join(FORMATS)}")
        now, secret = self._clock(), f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
        begin = _monday(now)
        webhook = Webhook(secrets.token_hex(4), url, kind, " ".join(chosen), secret, now, begin, next_attempt_at=now)
        await self._store.write(rows.insert_webhook, webhook)
        return webhook

    async def all(self) -> list[Webhook]:
        """Return every webhook, oldest first."""
        return await self._store.read(rows.all_webhooks)

    async def remove(self, webhook_id: str) -> None:
        """Delete a webhook, or raise `UnknownWebhookError`."""
        if not await self._store.write(rows.delete_webhook, webhook_id):
            raise UnknownWebhookError(webhook_id)

    async def test(self, webhook_id: str) -> None:
        """Send a message; if it is accepted, switch the webhook on again.

        Raises:
            UnknownWebhookError: No webhook has this id.
            NotAcceptedError: The receiver has not accepted the message.
        """
        webhook = next((each for each in await self.all() if each.webhook_id == webhook_id), None)
        if webhook is None:
            raise UnknownWebhookError(webhook_id)
        text = f"Test of webhook {webhook_id}: messages arrive."
        await self._send(webhook, Message("test", None, text, {}, [secrets.token_hex(8)]))
        on = {"next_attempt_at": self._clock(), "failing_since": None, "last_error": None}
        await self._store.write(rows.update_webhook, webhook_id, webhook.next_attempt_at, **on)

    async def deliver(self) -> None:
        """Send the news of all webhooks that are due, and that no other process has claimed; raise as `Store.read`."""
        now = self._clock()
        due = [each for each in await self.all() if each.next_attempt_at is not None and each.next_attempt_at <= now]
        await asyncio.gather(*map(self._deliver, due))

    async def _deliver(self, webhook: Webhook) -> None:
        webhook_id, claimed_until, since = webhook.webhook_id, self._clock() + _CLAIM, webhook.failing_since

        def update(before: datetime | None, **values: object) -> Awaitable[bool]:
            return self._store.write(rows.update_webhook, webhook_id, before, **values)

        if not await update(webhook.next_attempt_at, next_attempt_at=claimed_until):
            return
        try:
            async for message, save in self._news(webhook, claimed_until):
                if message is not None:
                    await self._send(webhook, message)
                    since = None
                await self._store.write(save)
        except NotAcceptedError as error:
            now = self._clock()
            if since is None:
                logger.warning("webhook %s fails, and is tried again: %s", webhook_id, error)
            since = since or now
            next_at: datetime | None = now + min(max(now - since, _SHORTEST_WAIT), _LONGEST_WAIT)
            if now - since >= GIVEN_UP:
                next_at = None
                logger.error("webhook %s is switched off after three days of failures: %s", webhook_id, error)
            await update(claimed_until, next_attempt_at=next_at, failing_since=since, last_error=str(error)[:255])
        else:
            await update(claimed_until, next_attempt_at=self._clock(), failing_since=None, last_error=None)

    async def _news(self, webhook: Webhook, claimed_until: datetime) -> AsyncIterator[tuple[Message | None, Save]]:
        """Yield messages, each with what to save once it is accepted, for `_DELIVERY_S` at most."""
        end, monday = time.monotonic() + _DELIVERY_S, _monday(self._clock())
        if webhook.week < monday:
            total = await self._weekly(monday - _WEEK) if "weekly" in webhook.events else None
            yield total, lambda each: rows.update_webhook(each, webhook.webhook_id, claimed_until, week=monday)
        after: str | None = ""
        while after is not None:
            page = await self._store.read(rows.jobs_with_news, webhook.webhook_id, after=after, limit=_JOBS_AT_ONCE)
            after = page[-1][0] if page else None
            for job_id, known in page:
                try:
                    steps = await self._store.read(news_of, webhook, job_id, known)
                except UnknownJobError:
                    continue
                for message, then in steps:
                    if time.monotonic() > end:
                        return
                    yield message, partial(rows.save_known_job, known=then)

    async def _weekly(self, begin: datetime) -> Message | None:
        """Return the total of the week that begins then, or None without a trial that ended in it."""
        jobs, trials, reached, energy_j, time_s = await self._store.read(rows.totals_between, begin, begin + _WEEK)
        if not trials:
            return None
        totals = (await TotalsReader(self._store, self._clock).read()).values()
        words = [each.verdict for each in totals]
        saves, loses = words.count(SavingsWord.SAVES), words.count(SavingsWord.LOSES)
        saved_j = sum(each.saved_energy_j or 0.0 for each in totals)
        data = {"week": begin.date().isoformat(), "jobs": jobs, "trials": trials, "reached": reached}
        data |= {"energy_j": energy_j, "time_s": time_s, "saves": saves, "loses": loses, "saved_energy_j": saved_j}
        runs, of_jobs = "1 run" if trials == 1 else f"{trials} runs", "1 job" if jobs == 1 else f"{jobs} jobs"
        save, lose = "saves" if saves == 1 else "save", "loses" if loses == 1 else "lose"
        text = (
            f"Week from {begin:%Y-%m-%d}: {runs} of {of_jobs} ended, {reached} reached the target; "
            f"{energy_j / 3.6e6:.3g} kWh used. Of all jobs, {saves} {save} and {loses} {lose}; "
            f"saved since their beginning: {saved_j / 3.6e6:.3g} kWh."
        )
        return Message("weekly", None, text, data, [begin])

    async def _send(self, webhook: Webhook, message: Message) -> None:
        message_id, timestamp = message.id_for(webhook.webhook_id), int(self._clock().timestamp())
        body = body_of(message, message_id, webhook.format)
        headers = {
            "content-type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature_of(webhook.secret, message_id, timestamp, body),
        }
        await _post(webhook.url, body, headers)


def _monday(instant: datetime) -> datetime:
    """Return the start of the instant's week in UTC."""
    day = instant.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day - timedelta(days=day.weekday())


async def _post(url: str, body: bytes, headers: dict[str, str]) -> None:
    """Send a body; raise `NotAcceptedError` without a status 2xx within `DEADLINE_S`. The answer's body is not read."""
    try:
        # The thread also imports httpx, which takes a tenth of a second.
        async with asyncio.timeout(DEADLINE_S):
            tls = await asyncio.to_thread(_tls)
            import httpx

            async with (
                httpx.AsyncClient(verify=tls, timeout=DEADLINE_S) as client,
                client.stream("POST", url, content=body, headers=headers, follow_redirects=False) as answer,
            ):
                status = answer.status_code
    except TimeoutError as error:
        raise NotAcceptedError(f"no answer within {DEADLINE_S:g} s") from error
    except Exception as error:  # Invalid names, certificates and answers each have errors of their own.
        raise NotAcceptedError(printable(f"{type(error).__name__}: {error}")) from error
    if not 200 <= status < 300:
        raise NotAcceptedError(f"the receiver answered {status}")


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    import httpx

    # httpx would log the receivers' addresses, which are secrets with Slack and Teams.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return httpx.create_ssl_context()
