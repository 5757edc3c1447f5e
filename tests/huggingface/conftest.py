"""Fixtures shared by the tests of the Trainer's callbacks. All of them are skipped without transformers."""

from __future__ import annotations

import os
from importlib.util import find_spec

if os.environ.get("CI") or find_spec("transformers") is not None:
    from tests.support.frameworks import use_one_thread  # noqa: F401 - pytest finds them by name
    from tests.support.hf_bench import make_bench  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]
