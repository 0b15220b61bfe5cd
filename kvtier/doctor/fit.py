"""Do the model's blocks fit the tiers? Sizes follow from the layout alone."""

from collections.abc import Iterator

from kvtier import formats
from kvtier.config import HostSettings, NvmeSettings
from kvtier.doctor.findings import Finding, ModelFacts, Subject, ok, problem, shown_size, warning
from kvtier.layout import DTYPE_BYTES
from kvtier.policies import make_policy

__all__ = ["capacity", "dtype", "encoding", "layout", "policy"]

_PAGE = 4096
_WASTE = 0.1


def dtype(subject: Subject) -> Iterator[Finding]:
    """KV of another element type is another namespace: it costs its own space and is never found."""
    model = subject.model
    if model is None:
        yield warning(
            "dtype",
            "the model's files are not here: element type, layout and break-even cannot be checked",
            "set model.path, or fetch the default model with `kvtier model get`",
        )
        return
    own, stored = model.own_dtype, model.layout.groups[0].dtype
    if DTYPE_BYTES[stored] > DTYPE_BYTES.get(own, DTYPE_BYTES[stored]):
        yield warning(
            "dtype",
            f"{model.name} is {own}, its KV is kept as {stored}: every block takes twice the space, and KV stored "
            f"by a {own} run is not found",
            f'set model.dtype = "{own}" where the machine computes in it at speed',
        )
    else:
        kv_format = subject.config.engine.kv_format
        yield ok("dtype", f"KV of {model.name} is kept as {stored if kv_format == 'raw' else kv_format}")


def layout(subject: Subject) -> Iterator[Finding]:
    """Bytes per token and per block, and what padding to whole pages wastes."""
    model = subject.model
    if model is None:
        return
    nbytes, size = model.block_bytes, model.layout.block_size
    what = f"{shown_size(model.token_bytes)} of KV per token, {shown_size(nbytes)} per block of {size} tokens"
    padded = -(-nbytes // _PAGE) * _PAGE
    if padded - nbytes > _WASTE * padded:
        yield warning(
            "layout",
            f"{what}; padding to whole pages wastes {1 - nbytes / padded:.0%} of every tier",
            "choose a larger engine.block_size",
        )
    else:
        yield ok("layout", what)


def _tiers(subject: Subject) -> dict[str, HostSettings | NvmeSettings]:
    tiering = subject.config.tiering
    return {name: tier for name, tier in (("host", tiering.host), ("nvme", tiering.nvme)) if tier is not None}


def encoding(subject: Subject) -> Iterator[Finding]:
    """KV in a lossy format is reused by nobody who did not ask for it; host takes blocks of one size only."""
    host, model = subject.config.tiering.host, subject.model
    if host is not None and model is not None and formats.get(host.format).size(model.layout) is None:
        yield problem(
            "encoding",
            f"host cannot keep blocks in {host.format}: their size depends on what is in them",
            "choose raw or a lossy format for host; such a format is for nvme",
        )
        return
    lossy = [name for name, tier in _tiers(subject).items() if not formats.get(tier.format).exact]
    if lossy and not subject.config.tiering.accept_lossy:
        yield problem(
            "encoding",
            f"lossy format in {' and '.join(lossy)}: requests do not reuse such KV unless they ask for it",
            "set tiering.accept_lossy = true, or choose raw or bitsplit as the format",
        )
    elif lossy:
        yield warning(
            "encoding",
            f"lossy format in {' and '.join(lossy)}: outputs may differ",
            "choose raw or bitsplit where outputs must not differ",
        )
    else:
        yield ok("encoding", "every tier keeps KV bit by bit")


def policy(subject: Subject) -> Iterator[Finding]:
    """A policy is looked up when the tiers are opened; one that cannot be had ends the start of the server."""
    host = subject.config.tiering.host
    if host is not None:
        # What is wrong with it is raised, and reported by `examine`.
        make_policy(host.policy, 1)
        yield ok("policy", f"host evicts by {host.policy}")


def capacity(subject: Subject) -> Iterator[Finding]:
    """How many blocks each tier takes, and whether that is of use."""
    tiers, model = _tiers(subject), subject.model
    if not tiers:
        yield warning("capacity", "tiering is off: KV is lost when device memory is full", "set tiering.host.capacity")
        return
    sizes = {name: tier.capacity for name, tier in tiers.items()}
    if sizes.get("nvme", sizes["host"] + 1) <= sizes["host"]:
        yield warning(
            "capacity",
            f"nvme ({shown_size(sizes['nvme'])}) is no larger than host ({shown_size(sizes['host'])}): "
            "it holds only copies",
            "give tiering.nvme.capacity several times tiering.host.capacity",
        )
    if model is not None:
        for name, tier in tiers.items():
            yield _blocks(model, name, tier)


def _blocks(model: ModelFacts, name: str, tier: HostSettings | NvmeSettings) -> Finding:
    encoded = formats.get(tier.format).size(model.layout)
    # Where the size depends on the data, raw is the bound.
    padded = -(-(encoded or model.block_bytes) // _PAGE) * _PAGE
    blocks = tier.capacity // padded
    tokens = blocks * model.layout.block_size
    what = f"{name} takes {blocks:,} blocks in format {tier.format}, {tokens:,} tokens"
    if blocks == 0:
        return problem(
            "capacity",
            f"{name}: {shown_size(tier.capacity)} is less than one block of {shown_size(padded)}: nothing is stored",
            f"set tiering.{name}.capacity to at least {shown_size(padded)}, or switch the tier off",
        )
    if tokens < model.max_tokens:
        needed = -(-model.max_tokens // model.layout.block_size) * padded
        return warning(
            "capacity",
            f"{what}: less than one request of the full context ({model.max_tokens:,} tokens)",
            f"set tiering.{name}.capacity to at least {shown_size(needed)}",
        )
    return ok("capacity", what)
