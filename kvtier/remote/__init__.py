"""Remote tiers: blocks in a store that other machines share, behind the Tier protocol.

backend    what a remote tier needs of the other side
envelope   what a record says of itself, and what it is called
tier       RemoteTier: the Tier protocol over any backend
opening    from a URL to a tier
valkey     Valkey and Redis
objects    object stores and shared directories
peer       another cache service
"""

from kvtier.remote.backend import Backend, BackendStats, Fetch, Stored, Upload
from kvtier.remote.envelope import ENVELOPE_BYTES, NAME_BYTES, Envelope, record_name
from kvtier.remote.opening import answer_seconds, open_remote
from kvtier.remote.tier import RemoteOptions, RemoteTier

__all__ = [
    "ENVELOPE_BYTES",
    "NAME_BYTES",
    "Backend",
    "BackendStats",
    "Envelope",
    "Fetch",
    "RemoteOptions",
    "RemoteTier",
    "Stored",
    "Upload",
    "answer_seconds",
    "open_remote",
    "record_name",
]
