"""The header that shows a token or an API key."""

from kvtier.errors import ConfigError

__all__ = ["bearer"]


def bearer(token: str | None) -> dict[str, str]:
    """Headers of a request; none without a token.

    Raises:
        ConfigError: no header can carry it. The message does not show it.
    """
    if not token:
        return {}
    if not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ConfigError(
            f"token or API key of {len(token)} characters: one of them cannot be sent; expected printable ASCII, "
            "without a space or a line break at either end"
        )
    return {"Authorization": f"Bearer {token}"}
