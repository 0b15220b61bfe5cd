"""What a caller knows of a request's KV, on its way through vLLM: `kv_transfer_params["kvtier"]`."""

import logging
from typing import Any

from kvtier.errors import RequestError
from kvtier.hints import RequestHints

__all__ = ["hints_of"]

_log = logging.getLogger(__name__)
_KEY = "kvtier"


def hints_of(request: Any) -> RequestHints | None:
    """The hints of a request of vLLM's; None where it has none, or such as make no sense: that costs no request."""
    given = (request.kv_transfer_params or {}).get(_KEY)
    if given is None:
        return None
    try:
        return RequestHints(**given)
    except (TypeError, RequestError) as error:
        _log.warning("request %s: kv_transfer_params[%r] = %r is ignored: %s", request.request_id, _KEY, given, error)
        return None
