"""Every policy has a name on pages."""

from __future__ import annotations

from moeq.estimator import known_policies
from moeq.estimator.policies import label
from moeq.reporting.estimate_page import NAMES
from moeq.reporting.speed import POLICIES


def test_every_policy_has_its_names() -> None:
    labels = {label(name, variant) for name, policy in known_policies().items() for variant in policy.variants}
    assert set(NAMES) == labels
    assert set(POLICIES) == labels
