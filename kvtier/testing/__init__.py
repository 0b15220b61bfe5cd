"""Public conformance suites, ready to subclass in a third party's tests, and a tier that fails as it is told to.

Nothing here imports a test framework; pytest rewrites the asserts where `pytest.register_assert_rewrite` names them.
"""

from kvtier.testing.adapter_case import AdapterCase, AdapterEngine, AdapterSetup
from kvtier.testing.adapters import AdapterSuite
from kvtier.testing.faults import Fault, Kind
from kvtier.testing.faulty import FaultyHostTier, FaultyTier
from kvtier.testing.formats import FormatSuite
from kvtier.testing.policies import PolicySuite
from kvtier.testing.tiers import OpenTierSuite, TierSuite

__all__ = [
    "AdapterCase",
    "AdapterEngine",
    "AdapterSetup",
    "AdapterSuite",
    "Fault",
    "FaultyHostTier",
    "FaultyTier",
    "FormatSuite",
    "Kind",
    "OpenTierSuite",
    "PolicySuite",
    "TierSuite",
]
