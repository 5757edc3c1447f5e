"""First versions of the frameworks with a feature, by which tests skip older versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.version import Version


def is_older(package: str, than: str) -> bool:
    """Return True if an older version of the package is installed."""
    try:
        return Version(version(package)) < Version(than)
    except PackageNotFoundError:
        return False


def since(package: str, first: str, feature: str) -> pytest.MarkDecorator:
    """Skip a test of a feature that the package has since version `first`."""
    return pytest.mark.skipif(is_older(package, first), reason=f"{package} before {first}: {feature}")


WEIGHTS_ONLY = {} if is_older("lightning", "2.6") else {"weights_only": True}
"""The argument by which Lightning loads a checkpoint that holds plain types only, where it has that argument."""
