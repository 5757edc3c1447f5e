"""Items are processed in groups, and none suffers for another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bso_server.service.reports import Commit, GroupCommit


class Doubler:
    """Doubles numbers; refuses 13, and breaks down over any group that holds 0."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, items: Sequence[int], *, waits: bool) -> list[int | Exception]:  # noqa: ARG002 - it never does
        self.groups.append(list(items))
        await self.gate.wait()
        if 0 in items:
            raise RuntimeError("the transaction failed")
        return [ValueError("unlucky") if item == 13 else 2 * item for item in items]


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
