"""Replays of jobs by the simulator, one at a time, each in a process of its own beside the event loop.

A process, because a policy that plays thousands of trials would hold the interpreter's lock against reports in this
one, and a thread cannot be ended. See `simulate.replay` for its bounds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from pydantic import ValidationError

from bso_server.service.page_views import ReplayState, ReplayView
from bso_server.service.what_if import ReplayKey
from bso_server.simulate.messages import Answer, Question

LIMIT_S = 300.0
"""Seconds after which a replay is ended, whatever it does: fifteen on an idle machine, and by its priority many more on
a busy one."""

_REMEMBERED = 100

# A library that opens a thread for each core takes address space for each, and no replay multiplies large matrices.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

# Without -P, files of the server's working directory would be taken for modules.
COMMAND = (sys.executable, "-P", "-m", "bso_server.simulate.replay")

logger = logging.getLogger("bso_server")


class Replays:
    """Plays jobs anew in the background, and remembers the answers, each for the event of the job that it goes up to.

    Args:
        command: Reads a `Question` and writes an `Answer`, both as JSON.
        limit_s: Seconds after which it is ended.
    """

    def __init__(self, command: Sequence[str] = COMMAND, *, limit_s: float = LIMIT_S) -> None:
        self._command = command
        self._limit_s = limit_s
        self._known: OrderedDict[ReplayKey, ReplayView] = OrderedDict()
        self._running: ReplayKey | None = None
        self._task: asyncio.Task[None] | None = None

    async def look(self, key: ReplayKey, ask: Callable[[], Awaitable[Question]]) -> ReplayView:
        """The progress of a replay, which begins with the first look unless another one is being played.

        Args:
            key: The question's.
            ask: Reads the question.
        """
        _, event = key
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if self._running is None:
            # Before anything is awaited: two looks at once must not begin two.
            self._running = key
            self._task = asyncio.create_task(self._play(key, ask))
        state = ReplayState.RUNNING if self._running == key else ReplayState.BUSY
        return ReplayView(event=event, state=state)

    async def close(self) -> None:
        """End the one that is being played."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _play(self, key: ReplayKey, ask: Callable[[], Awaitable[Question]]) -> None:
        try:
            self._known[key] = self._view(key[1], await self._answer(await ask()))
        except Exception:
            logger.exception("a replay failed")
            self._known[key] = self._view(key[1], Answer(refused="it broke off; the server's log says why"))
        finally:
            self._running = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _view(self, event: int, answer: Answer) -> ReplayView:
        if answer.replayed is None:
            return ReplayView(event=event, state=ReplayState.FAILED, reason=answer.refused)
        return ReplayView(event=event, state=ReplayState.DONE, replayed=answer.replayed)

    async def _answer(self, question: Question) -> Answer:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | _ONE_THREAD
        )
        try:
            async with asyncio.timeout(self._limit_s):
                output, errors = await process.communicate(question.model_dump_json().encode())
        except TimeoutError:
            return Answer(refused=f"it took more than {self._limit_s:g} s, and was ended")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return Answer.model_validate_json(output)
        except ValidationError:
            logger.warning("a replay ended with status %s: %s", process.returncode, errors.decode(errors="replace"))
            return Answer(refused="it broke off; the server's log says why")
