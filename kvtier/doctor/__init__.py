"""The doctor: looks for what gives "0 % hits", wrong sizes and slow tiers, before a user meets it.

examine -> machine, limits, disk, fit, hashing, speed      one module per kind of check; findings: what they say
model                                                      what the configured model's KV looks like, and prefill speed

Every check does what the tiers will do, on this machine, and leaves nothing behind.
"""

from kvtier.doctor.examine import examine
from kvtier.doctor.findings import Finding, Level, ModelFacts, Subject

__all__ = ["Finding", "Level", "ModelFacts", "Subject", "examine"]
