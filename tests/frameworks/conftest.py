"""The bench of each framework in turn: both frameworks must pass the tests of this folder."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import FrameworkBench, use_one_thread  # noqa: F401 - pytest finds the fixture by its name
from tests.support.lightning_bench import QUIET, RESUMES
from tests.support.servers import ServerProcess

IS_ABSENT = find_spec("transformers") is None and not os.environ.get("CI")
FRAMEWORKS = [
    pytest.param("lightning_bench", id="lightning", marks=[*QUIET, *RESUMES]),
    pytest.param("hf_bench", id="huggingface", marks=pytest.mark.skipif(IS_ABSENT, reason="needs the transformers")),
]


@pytest.fixture(params=FRAMEWORKS)
def kind(request: pytest.FixtureRequest) -> Any:
    """The class of a framework's bench."""
    return import_module(f"tests.support.{request.param}").Bench


@pytest.fixture
def bench(kind: Any, shared_server: ServerProcess, tmp_path: Path) -> FrameworkBench:
    made: FrameworkBench = kind(shared_server, f"digits-{uuid.uuid4().hex}", tmp_path / "training")
    return made


@pytest.fixture
def mortal_bench(kind: Any, server: ServerProcess, tmp_path: Path) -> FrameworkBench:
    """With a server that the test may kill."""
    made: FrameworkBench = kind(server, "digits-nightly", tmp_path / "training")
    return made


@pytest.fixture(name="_sigint_afterwards")
def restore_sigint() -> Iterator[None]:
    """Lightning turns Ctrl-C off during its shutdown and does not turn it on again."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
