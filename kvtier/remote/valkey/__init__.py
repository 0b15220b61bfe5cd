"""Records in a Valkey or Redis server or cluster.

transport  sockets that send scattered memory and receive into memory
resp       commands as they are sent, replies as they come in
node       one server's connections
routing    which server has which key
exchange   a batch's commands and replies, and redirections
backend    the verbs
opening    from a URL to a backend
"""

from kvtier.remote.valkey.backend import ValkeyBackend

__all__ = ["ValkeyBackend"]
