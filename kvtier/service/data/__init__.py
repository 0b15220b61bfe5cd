"""The data port: block bytes over TCP and a Unix socket, and shared memory for clients on this machine.

server      listens, knows the connections, drains
connection  one connection: frames in, answers out, errors
session     what a connection has: its caller, its leases, its staging region
verbs       verbs whose answer is a head
reading     get and lease, window by window
writing     put and stage, window by window
sharing     regions for clients on this machine; listing: which blocks a namespace has
buffers     memory for bodies, bounded
"""

from kvtier.service.data.server import DataServer

__all__ = ["DataServer"]
