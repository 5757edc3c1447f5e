"""Our own policies satisfy the server's requirements in random histories."""

from __future__ import annotations

import pytest

from tests.support.policies import check_policy
from zeus_plugins.protocol import OWN_POLICIES


@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_own_policies_conform(policy: str) -> None:
    check_policy(policy, seeds=(0, 4), trials=30)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_own_policies_conform_over_long_histories(policy: str) -> None:
    check_policy(policy, seeds=range(12), trials=80)
