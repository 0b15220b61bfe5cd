"""`kvtier inspect`: what a directory of the NVMe tier holds, whether it is sound, and putting it in order."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.errors import ConfigError
from kvtier.keys import namespace_digest
from kvtier.nvme.checking import FAULTS
from kvtier.nvme.inspection import Look, compact, look, maintain

__all__ = ["inspect"]


def inspect(  # noqa: PLR0913  one parameter per option
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of an NVMe tier.")],
    *,
    stats: Annotated[bool, typer.Option("--stats", help="Print sizes and counts (the default).")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print every block.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Account for every page and read every block.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged, reclaim what is leaked.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Drop all blocks, or those of --namespace.")] = False,
    namespace: Annotated[str | None, typer.Option(metavar="HEX", help="Digest, or how it begins.")] = None,
    squeeze: Annotated[bool, typer.Option("--compact", help="Rewrite the index without unused pages.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look into a directory of the NVMe tier, check it, or put it in order.

    All but --compact work while other processes use the directory. In this order: --repair, --clear, --compact, then
    --stats, --list, --verify. Exits with 1 if --verify finds something unsound.
    """
    if namespace is not None and not clear:
        raise ConfigError(f"--namespace {namespace} without --clear: it says what to clear")
    row: dict[str, Any] = {"directory": str(directory)}
    if repair or clear:
        row |= _put_in_order(directory, repair=repair, clear=clear, namespace=namespace)
    if squeeze:
        row["index_bytes_before"], row["index_bytes"] = compact(directory)
    with look(directory) as found:
        if stats or not (listing or verify or repair or clear or squeeze):
            row |= found.stats()
        if verify:
            report = found.check(verify=True)
            row |= report | {"sound": not any(report[fault] for fault in FAULTS)}
        _show(row, found, listing=listing, as_json=as_json)
    if not row.get("sound", True):
        raise typer.Exit(1)


def _put_in_order(path: Path, *, repair: bool, clear: bool, namespace: str | None) -> dict[str, int | str]:
    chosen = None if namespace is None else _namespace(path, namespace)
    row: dict[str, int | str] = {}
    with maintain(path) as opened:
        row |= opened.opening()
        if repair:
            row |= opened.repair()
        if clear:
            row["cleared"] = opened.clear(chosen)
    return row


def _namespace(path: Path, digest: str) -> int:
    """The one namespace of the directory whose digest begins like this."""
    with look(path) as found:
        known = set(found.namespaces())
    wanted = [ns for ns in known if namespace_digest(ns).hex().startswith(digest.lower())]
    if len(wanted) != 1 or not digest:
        names = ", ".join(sorted(namespace_digest(ns).hex()[:16] for ns in known)) or "none"
        raise ConfigError(f"--namespace {digest!r} names {len(wanted)} namespaces; {path} has: {names}")
    return wanted[0]


def _show(row: dict[str, Any], found: Look, *, listing: bool, as_json: bool) -> None:
    blocks = (
        {
            "key": block.ref.key.hex(),
            "namespace": namespace_digest(block.ref.ns).hex()[:16],
            "depth": block.ref.depth,
            "format": block.fmt,
            "bytes": block.nbytes,
            "exact": block.ref.exact,
        }
        for block in (found.listed() if listing else ())
    )
    if as_json:
        typer.echo(json.dumps(row | ({"list": list(blocks)} if listing else {})))
        return
    for block in blocks:
        typer.echo("\t".join(str(value) for value in block.values()))
    width = max(len(name) for name in row)
    for name, value in row.items():
        typer.echo(f"{name:{width}}  {value}")
