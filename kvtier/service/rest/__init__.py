"""The REST API: block bytes and everything else, over HTTP. Needs the extra `server`.

app        the application: routes, guards, errors
blocks     one block; batches: many of them in one stream
catalogue  namespaces, pins, prefetches, sessions
admin      figures, tenants, what only admins may do
events     server-sent events; page: the page for people
bodies     JSON of requests, answers, statistics: of answers; heads: headers of blocks; headers: of requests
spec       the OpenAPI document; samples: what its examples show
guards     token, size and pace of a request; protocol: the same for its connection
memory     of bodies on their way in; sending: block bytes on their way out
calls      what routes have in common; errors: refusals as clients read them
"""

from kvtier.service.rest.app import make_app
from kvtier.service.rest.protocol import connection_options

__all__ = ["connection_options", "make_app"]
