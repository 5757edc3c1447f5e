"""Lightness of the training side; `python -m release check` installs it without extras, and uses it."""

from __future__ import annotations

import re
import subprocess
import sys

from release.__main__ import PROJECT

FRAMEWORKS = ["torch", "lightning", "pytorch_lightning", "transformers"]
HEAVY = [*FRAMEWORKS, "litestar", "sqlalchemy", "bso_server", "numpy", "pynvml"]


def test_training_side_loads_no_framework_and_no_server() -> None:
    parts = [f"zeus_plugins.{part}" for part in ("training.session", "client.http", "cli", "master", "testing")]
    program = f"import sys, {', '.join(parts)}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_training_images_get_three_packages_and_their_dependencies() -> None:
    named = {re.split(r"[^\w.-]", each)[0] for each in PROJECT["dependencies"]}
    assert named == {"httpx", "nvidia-ml-py", "pydantic"}


def test_missing_package_is_named_with_a_remedy() -> None:
    program = (
        "import sys; sys.modules['rich.console'] = None; from zeus_plugins.cli import main; sys.exit(main(['demo']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not installed: pip install 'zeus-plugins[demo]'" in done.stderr
