"""Object stores and shared directories as a remote tier: S3, GCS, Azure, NFS, through obstore (extra `objects`).

opening     from a URL and options to a backend
backend     ObjectBackend: runs of records as objects
packing     what an object is
directory   which objects and records this process has seen
requests    many requests at a time, all over by a deadline

Nothing here is imported before it is needed.
"""

__all__: list[str] = []
