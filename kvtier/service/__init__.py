"""The cache service: the store as a daemon that engines in any language share. Needs the extra `server`.

cache      the domain: callers, tenants, namespaces, quotas, verbs; no HTTP, no sockets
rest       the REST API over it
data       the data port over it: TCP, Unix socket, shared memory
dashboard  one page for people
exposure   who can reach it, refused where that is not safe
run        the process: ports, signals, the drain
"""

__all__: list[str] = []
