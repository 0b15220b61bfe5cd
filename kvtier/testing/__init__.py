"""Public conformance suites: what a tier or policy must do, ready to subclass in a third party's tests.

Nothing here imports a test framework; pytest rewrites the asserts where `pytest.register_assert_rewrite` names them.
"""

from kvtier.testing.policies import PolicySuite
from kvtier.testing.tiers import TierSuite

__all__ = ["PolicySuite", "TierSuite"]
