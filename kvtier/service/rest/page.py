"""The page for people: a few files, which may load nothing but one another and talk to nobody but this service."""

from pathlib import Path

from fastapi import APIRouter, Response

__all__ = ["PAGE_PATHS", "page_routes"]

_FOLDER = Path(__file__).parents[1] / "dashboard"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _path(name: str) -> str:
    return "/" if name == "index.html" else f"/dashboard/{name}"


# Nothing that is asked for becomes the path of a file.
_FILES = {_path(file.name): file for file in sorted(_FOLDER.iterdir()) if file.suffix in _KINDS}

PAGE_PATHS = frozenset(_FILES)
"""Served without a token: they show nothing of anybody, and ask for one."""


def page_routes() -> APIRouter:
    """One route per file, none of them in the document."""
    router = APIRouter()
    for path, file in _FILES.items():
        _add(router, path, Response(file.read_bytes(), media_type=_KINDS[file.suffix], headers=_HEADERS))
    return router


def _add(router: APIRouter, path: str, answer: Response) -> None:
    @router.get(path, include_in_schema=False)
    async def page() -> Response:
        return answer
