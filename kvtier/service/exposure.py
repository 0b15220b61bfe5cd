"""Who can reach the service, and whether that is safe: refused before anything is opened."""

from kvtier.config import ServiceSettings
from kvtier.errors import ConfigError
from kvtier.http.exposure import check_tls, is_loopback

__all__ = ["check_exposure"]


def check_exposure(settings: ServiceSettings) -> None:
    """Let settings pass under which nobody reads or writes others' blocks unasked.

    Raises:
        ConfigError: off loopback without tokens, or without TLS unless `service.allow_plaintext`; several tenants
            without tokens that tell them apart; a certificate that is none.
    """
    if settings.tenants is not None and settings.tokens is None:
        raise ConfigError(
            "service.tenants without service.tokens: nobody could say which tenant a caller is of; set service.tokens "
            "and make some with `kvtier cache token create --tenant NAME`"
        )
    if settings.tokens is None and not is_loopback(settings.host, "service"):
        raise ConfigError(
            f"service.host = {settings.host!r} is reached from other machines, and service.tokens is none: set it and "
            "make a token with `kvtier cache token create`, or listen on 127.0.0.1"
        )
    check_tls(settings, "service", "tokens and blocks")
