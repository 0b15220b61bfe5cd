"""A peer: another process's cache service as the lowest tier of this store.

opening      from a `kvtier://` URL to a backend
backend      records as opaque blocks of the service's data port
connections  connections to it, kept and used again
link         one of them: records from the socket, or from shared memory
"""

from kvtier.remote.peer.backend import PeerBackend
from kvtier.remote.peer.connections import Connections

__all__ = ["Connections", "PeerBackend"]
