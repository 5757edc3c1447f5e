"""Commits in groups: what arrives while one transaction runs is taken by the next, all together.

A commit waits for the disk, whatever it holds. Sharing it is what makes many small writes cheap. No delay is added to
form a group: the first item starts as soon as what has arrived with it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# Turns of the event loop before a group is taken, some microseconds each: a request that has reached the socket by then
# is in the group. That many lie between the socket and `submit`.
_TURNS = 3

# One group must not grow so large that its members wait long, or that a database refuses the statement.
_LARGEST_GROUP = 200


class Groups(Generic[Item, Answer]):
    """Hands items to `process` in groups, one group at a time.

    Args:
        process: Handles a group in one transaction: an answer, or the error of that item alone, per item, in order.
            When it raises, nothing of the group is in force, and its items are processed one by one.
    """

    def __init__(self, process: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Exception]]]) -> None:
        self._process = process
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Answer:
        """Process an item with others; the answer comes after the commit.

        Raises:
            Exception: The item's own error, or that of its transaction.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            group, self._waiting = self._waiting[:_LARGEST_GROUP], self._waiting[_LARGEST_GROUP:]
            try:
                outcomes = await self._process([item for item, _ in group])
            except Exception as error:
                if len(group) == 1:
                    _settle(group[0][1], error)
                else:
                    await self._one_by_one(group)
            else:
                for (_, future), outcome in zip(group, outcomes, strict=True):
                    _settle(future, outcome)

    async def _one_by_one(self, group: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        """Find out whose fault it was that the group failed: the others must not suffer for it."""
        for item, future in group:
            try:
                (outcome,) = await self._process([item])
            except Exception as error:
                _settle(future, error)
            else:
                _settle(future, outcome)


def _settle(future: asyncio.Future[Answer], outcome: Answer | Exception) -> None:
    # A client that left has cancelled its future; what it sent is committed all the same.
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
