"""What blocks live in and what holds them: namespaces, pins, prefetches, sessions."""

from fastapi import APIRouter

from kvtier.service.rest.answers import NamespaceAnswer, NamespacesAnswer, PinAnswer, PrefetchAnswer
from kvtier.service.rest.bodies import NamespaceBody, PinBody, PrefetchBody
from kvtier.service.rest.calls import CallerOf, Id, Ns, Service, deadline
from kvtier.service.rest.spec import linked, refusals

__all__ = ["hold_routes", "namespace_routes"]


def namespace_routes(service: Service) -> APIRouter:
    """Routes of namespaces."""
    router, cache = APIRouter(tags=["namespaces"], dependencies=[service.turn]), service.cache

    @router.post(
        "/v1/namespaces",
        status_code=201,
        responses=refusals("conflict", "wrong_layout", "quota_exceeded", body=True)
        | linked(201, "ns", "name", "get_namespace", "clear_namespace", "drop_namespace"),
    )
    def create_namespace(caller: CallerOf, body: NamespaceBody) -> NamespaceAnswer:
        """Make a namespace; the same again is the same."""
        return NamespaceAnswer.of(cache.create_namespace(caller, body.spec()))

    @router.get("/v1/namespaces", responses=refusals())
    def list_namespaces(caller: CallerOf) -> NamespacesAnswer:
        """Those that the caller may use, by name."""
        return NamespacesAnswer(namespaces=[NamespaceAnswer.of(info) for info in cache.namespaces(caller)])

    @router.get("/v1/namespaces/{ns:part}", responses=refusals("unknown_namespace"))
    def get_namespace(caller: CallerOf, ns: Ns) -> NamespaceAnswer:
        """One namespace and its figures."""
        return NamespaceAnswer.of(cache.namespace(caller, ns))

    @router.post(
        "/v1/namespaces/{ns:part}:clear",
        status_code=204,
        responses=refusals("unknown_namespace", "unavailable", "timeout"),
    )
    def clear_namespace(caller: CallerOf, ns: Ns) -> None:
        """Remove all of its blocks from every tier."""
        cache.clear_namespace(caller, ns)

    @router.delete(
        "/v1/namespaces/{ns:part}", status_code=204, responses=refusals("unknown_namespace", "unavailable", "timeout")
    )
    def drop_namespace(caller: CallerOf, ns: Ns) -> None:
        """Remove a namespace and all of its blocks."""
        cache.drop_namespace(caller, ns)

    return router


def hold_routes(service: Service) -> APIRouter:
    """Routes of pins, prefetches and sessions."""
    router, cache = APIRouter(tags=["holds"], dependencies=[service.turn]), service.cache

    @router.post(
        "/v1/namespaces/{ns:part}/pins",
        status_code=201,
        responses=refusals("unknown_namespace", "unknown_block", "quota_exceeded", body=True)
        | linked(201, "id", "id", "unpin"),
    )
    def pin(caller: CallerOf, ns: Ns, body: PinBody) -> PinAnswer:
        """Keep the leading run that is in host there, for a while."""
        return PinAnswer.of(cache.pin(caller, ns, body.packed(), body.ttl))

    @router.delete("/v1/pins/{id:part}", status_code=204, responses=refusals("unknown_pin"))
    def unpin(caller: CallerOf, id: Id) -> None:  # noqa: A002 - the name in the path
        """End a pin."""
        cache.unpin(caller, id)

    @router.post(
        "/v1/namespaces/{ns:part}/prefetches",
        status_code=202,
        responses=refusals("unknown_namespace", body=True) | linked(202, "id", "id", "get_prefetch", "cancel_prefetch"),
    )
    def prefetch(caller: CallerOf, ns: Ns, body: PrefetchBody) -> PrefetchAnswer:
        """Bring the leading run into host, held by nobody."""
        until = deadline(body.timeout)
        return PrefetchAnswer.of(cache.prefetch(caller, ns, body.packed(), deadline=until, depth=body.depth))

    @router.get("/v1/prefetches/{id:part}", responses=refusals("unknown_prefetch"))
    def get_prefetch(caller: CallerOf, id: Id) -> PrefetchAnswer:  # noqa: A002 - the name in the path
        """How far a prefetch is."""
        return PrefetchAnswer.of(cache.prefetched(caller, id))

    @router.delete("/v1/prefetches/{id:part}", responses=refusals("unknown_prefetch"))
    def cancel_prefetch(caller: CallerOf, id: Id) -> PrefetchAnswer:  # noqa: A002 - the name in the path
        """Stop a prefetch and forget it; what has arrived stays."""
        return PrefetchAnswer.of(cache.cancel(caller, id))

    @router.post("/v1/sessions/{id:part}:end", status_code=204, responses=refusals("unknown_path"))
    def end_session(caller: CallerOf, id: Id) -> None:  # noqa: A002 - the name in the path
        """Say that no further turn of a session follows."""
        cache.end_session(caller, id)

    return router
