from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ["torch", "lightning", "pytorch_lightning", "transformers", "litestar", "sqlalchemy", "bso_server", "numpy"]


@pytest.mark.parametrize("module", ["zeus_plugins", "zeus_plugins.session", "zeus_plugins.client"])
def test_the_training_side_loads_no_framework_and_no_server(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
