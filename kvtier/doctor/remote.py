"""Is the remote tier there, and does it let this machine in?"""

from collections.abc import Iterator

from kvtier.doctor.findings import Finding, Subject, ok, problem, warning
from kvtier.errors import ConfigError, TierError
from kvtier.remote import answer_seconds

__all__ = ["remote"]

# A look-up that takes longer delays every request's first token by what a person notices.
_SLOW_SECONDS = 0.1


def remote(subject: Subject) -> Iterator[Finding]:
    """Asks it for one record. A server that is down is a source of misses, not an error: nobody else says so."""
    settings = subject.config.tiering.remote
    if settings is None:
        yield ok("remote", "no remote tier is configured: blocks are not shared with other machines")
        return
    try:
        seconds = answer_seconds(settings)
    except (ConfigError, TierError) as error:
        yield problem(
            "remote",
            f"{settings.url}: {error}",
            "start what is there, or mend tiering.remote; until then every look-up there is a miss",
        )
        return
    what = f"{settings.url} answers in {1000 * seconds:.3g} ms"
    if seconds > _SLOW_SECONDS:
        yield warning("remote", what, "choose a nearer one, or expect every first token to wait for it")
    else:
        yield ok("remote", what)
