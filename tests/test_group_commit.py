"""Items are processed in groups, and none suffers for another."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import pytest

from bso_server.errors import DatabaseUnavailableError
from bso_server.service.reports import Commit, GroupCommit
from bso_server.storage.transaction import RowLockedError


class Doubler:
    """Doubles numbers; refuses 13, and breaks down over any group that holds 0.

    Rows that are `locked` it doubles only in groups that wait, once `lock` is open.
    """

    def __init__(self, locked: Collection[int] = ()) -> None:
        self.groups: list[list[int]] = []
        self.waited: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.locked = set(locked)
        self.lock = asyncio.Event()

    async def __call__(self, items: Sequence[int], *, waits: bool) -> list[int | Exception]:
        (self.waited if waits else self.groups).append(list(items))
        await self.gate.wait()
        if waits:
            await self.lock.wait()
        if 0 in items:
            raise RuntimeError("the transaction failed")
        return [self._outcome(item, waits=waits) for item in items]

    def _outcome(self, item: int, *, waits: bool) -> int | Exception:
        if not waits and abs(item) in self.locked:
            return RowLockedError()
        return ValueError("unlucky") if item == 13 else 2 * item


def group_commit(commit: Commit[int, int], *, patience_s: float = 60.0) -> GroupCommit[int, int]:
    """Numbers that are equal but for their sign are of one row, and those with the same last digit of one queue."""
    return GroupCommit(commit, row_of=abs, queue_of=lambda item: abs(item) % 10, patience_s=patience_s)


async def outcomes(groups: GroupCommit[int, int], *items: int) -> list[int | BaseException]:
    return await asyncio.gather(*(groups.submit(item) for item in items), return_exceptions=True)


async def turn(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_what_has_reached_the_socket_together_shares_a_group() -> None:
    async def run() -> None:
        doubler = Doubler()
        groups: GroupCommit[int, int] = group_commit(doubler)
        first = asyncio.create_task(groups.submit(1))
        await turn(2)
        assert await asyncio.gather(first, groups.submit(2)) == [2, 4]
        assert doubler.groups == [[1, 2]]

    asyncio.run(run())


def test_the_first_waits_for_no_other_and_the_rest_share_the_next_group() -> None:
    async def run() -> None:
        doubler = Doubler()
        doubler.gate.clear()
        groups: GroupCommit[int, int] = group_commit(doubler)
        first = asyncio.create_task(groups.submit(1))
        await turn(5)
        assert doubler.groups == [[1]]
        rest = asyncio.create_task(outcomes(groups, 2, 3, 4))
        await asyncio.sleep(0)
        doubler.gate.set()
        assert (await first, await rest) == (2, [4, 6, 8])
        assert doubler.groups == [[1], [2, 3, 4]]

    asyncio.run(run())


def test_an_item_with_an_error_of_its_own_hurts_no_other() -> None:
    async def run() -> None:
        answers = await outcomes(group_commit(Doubler()), 1, 13, 3)
        assert answers[::2] == [2, 6]
        assert isinstance(answers[1], ValueError)

    asyncio.run(run())


def test_a_group_that_fails_is_processed_one_by_one() -> None:
    async def run() -> None:
        doubler = Doubler()
        answers = await outcomes(group_commit(doubler), 1, 0, 3)
        assert answers[::2] == [2, 6]
        assert isinstance(answers[1], RuntimeError)
        assert doubler.groups == [[1, 0, 3], [1], [0], [3]]

    asyncio.run(run())


def test_groups_are_bounded() -> None:
    async def run() -> None:
        doubler = Doubler()
        answers = await outcomes(group_commit(doubler), *range(100, 550))
        assert answers == [2 * item for item in range(100, 550)]
        assert [len(group) for group in doubler.groups] == [200, 200, 50]

    asyncio.run(run())


def test_an_item_is_processed_although_its_client_has_left() -> None:
    async def run() -> None:
        doubler = Doubler()
        doubler.gate.clear()
        groups: GroupCommit[int, int] = group_commit(doubler)
        client = asyncio.create_task(groups.submit(1))
        waiting = asyncio.create_task(groups.submit(2))
        await asyncio.sleep(0)
        client.cancel()
        doubler.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await client
        assert await waiting == 4
        assert [item for group in doubler.groups for item in group] == [1, 2]

    asyncio.run(run())


def test_items_of_locked_rows_are_processed_apart_queue_by_queue() -> None:
    async def run() -> None:
        doubler = Doubler(locked=[11, 21, 12])
        groups = group_commit(doubler)
        held = asyncio.create_task(outcomes(groups, 11, 5, 21, 12))
        await turn(20)
        assert doubler.groups == [[11, 5, 21, 12]]
        assert sorted(doubler.waited) == [[11, 21], [12]]
        assert await outcomes(groups, 6, 31) == [12, 62]
        assert not held.done()
        doubler.lock.set()
        assert await held == [22, 10, 42, 24]

    asyncio.run(run())


def test_items_of_a_row_stay_in_order_though_its_lock_is_gone_meanwhile() -> None:
    async def run() -> None:
        doubler = Doubler(locked=[11])
        groups = group_commit(doubler)
        first = asyncio.create_task(groups.submit(11))
        await turn(20)
        # It can be had by now, and the first waits for something else.
        doubler.locked.clear()
        rest = asyncio.create_task(outcomes(groups, -11, 4))
        await turn(20)
        assert (doubler.groups, doubler.waited) == ([[11], [4]], [[11]])
        doubler.lock.set()
        assert (await first, await rest) == (22, [-22, 8])
        assert doubler.waited == [[11], [-11]]
        # Nothing is held up any more.
        assert await groups.submit(11) == 22
        assert doubler.groups[-1] == [11]

    asyncio.run(run())


def test_items_of_a_row_stay_in_order_in_a_group_that_fails() -> None:
    async def run() -> None:
        doubler = Doubler(locked=[11])
        task = asyncio.create_task(outcomes(group_commit(doubler), 11, -11, 0))
        await turn(20)
        assert (doubler.groups, doubler.waited) == ([[11, -11, 0], [11], [0]], [[11, -11]])
        doubler.lock.set()
        assert (await task)[:2] == [22, -22]

    asyncio.run(run())


def test_an_item_whose_time_is_over_is_answered_and_not_processed() -> None:
    async def run() -> None:
        doubler = Doubler()
        doubler.gate.clear()
        groups = group_commit(doubler, patience_s=0.5)
        answers = asyncio.create_task(outcomes(groups, 1))
        await turn(5)
        late = await outcomes(groups, 2, 3)
        assert {type(answer) for answer in [*late, *await answers]} == {DatabaseUnavailableError}
        doubler.gate.set()
        assert await groups.submit(4) == 8
        assert doubler.groups == [[1], [4]]

    asyncio.run(run())
