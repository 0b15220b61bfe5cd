"""Every setting: its type, default and meaning. Illegal combinations are refused, never rewritten."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kvtier.config.events import EventsSettings
from kvtier.config.fields import (
    GIB,
    MIB,
    AnySize,
    Count,
    FilePath,
    ModelSource,
    Name,
    Port,
    Seconds,
    Section,
    Seed,
    Share,
    Size,
    Whole,
    conflict,
)
from kvtier.config.remote import RemoteSettings
from kvtier.config.router import RouterSettings
from kvtier.config.service import ServiceSettings

__all__ = [
    "Config",
    "EngineSettings",
    "HostSettings",
    "LogSettings",
    "ModelSettings",
    "NvmeSettings",
    "ServerSettings",
    "TieringSettings",
]


class ModelSettings(Section):
    """The language model."""

    path: ModelSource | None = Field(
        default=None, description="Hugging Face directory or GGUF file; none: the default model, fetched on first use"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Compute and KV element type; auto: the checkpoint's own"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto: cuda where a device is visible"
    )
    weights: Literal["auto", "int8"] = Field(
        default="auto",
        description="How matrices are kept; auto: in dtype; int8: 8 bits each, half of bfloat16, and rounded, so "
        "outputs and KV are another model's",
    )


class EngineSettings(Section):
    """The bundled engine."""

    block_size: Count = Field(default=16, description="Tokens per KV block; KV of another block size is never reused")
    memory: Size | None = Field(
        default=None, description="Device memory for KV blocks; none, and num_blocks none: 1GiB"
    )
    num_blocks: Count | None = Field(default=None, description="KV blocks in device memory, instead of memory")
    kv_format: Literal["raw", "int8", "int8r", "fp8", "int4r"] = Field(
        default="raw",
        description="How device memory keeps KV; raw: in dtype; others: coded, 2 to 4 times the blocks in the same "
        "memory, outputs differ, and other tiers keep the coded blocks apart from all others; not for "
        "latents (MLA)",
    )
    max_running: Count = Field(default=16, description="Requests computed in one step, at most")
    token_budget: Count = Field(
        default=512, description="Tokens computed in one step, at most; longer prompts are chunked"
    )
    max_model_len: Count | None = Field(
        default=None, description="Tokens of one request, prompt and output; none: the model's own limit"
    )
    seed: Seed = Field(default=0, description="What requests that bring no seed derive theirs from")
    order: Literal["fcfs", "priority", "slack", "longest_prefix"] = Field(
        default="fcfs",
        description="Who is computed first: who came first, the better class, whose next token is due, or whose "
        "prompt the device holds most of",
    )
    victims: Literal["fifo", "class", "slack", "cost"] = Field(
        default="fifo",
        description="Who gives way where blocks are missing: who came last, the least important, whose next token is "
        "due last, or who frees most for what it costs to bring back",
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        default="auto", description="Whether who gives way is kept in other tiers or computed again; auto: the cheaper"
    )
    ageing: Seconds = Field(default=30.0, description="Seconds of waiting that weigh as much as one class")
    watermark: Share = Field(
        default=0.01, description="Share of the blocks that stay free when a request is admitted beside others"
    )
    residency: Whole = Field(
        default=16, description="Steps that who lost its blocks is left alone after it got some again, if possible"
    )
    prefetch_ahead: Whole = Field(
        default=4, description="Waiting requests whose KV is brought to host memory meanwhile"
    )
    pipelined: bool = Field(default=False, description="Plan the next step while one is running")
    overlap_loads: bool = Field(
        default=False, description="Compute a request in the step that loads its KV, where the load takes no longer"
    )
    speculative: str = Field(
        default="off",
        description="Who guesses tokens ahead, for the same output sooner: off, prompt_lookup, or the path of a small "
        "model with the same vocabulary",
    )
    draft_tokens: Count = Field(default=8, description="Tokens guessed ahead per request and step, at most")
    cuda_graphs: bool = Field(
        default=True,
        description="Replay decode steps as CUDA graphs: less work for the host; of no effect on a CPU or with experts",
    )
    draft_memory: Size = Field(default=256 << 20, description="Memory for a small model's own KV")

    @model_validator(mode="after")
    def _one_pool_size(self) -> Self:
        if self.memory is not None and self.num_blocks is not None:
            raise conflict("memory and num_blocks both size the pool; keep one", "memory", "num_blocks")
        return self


class HostSettings(Section):
    """The host tier."""

    capacity: Size = Field(default=GIB, description="Host memory for KV blocks, a hard limit")
    policy: Name = Field(
        default="lru", description="Which block leaves first: lru, arc, clock2, s3fifo, or module:Class"
    )
    format: Name = Field(
        default="raw",
        description="How blocks are encoded here, in a format of fixed size; lossy ones need accept_lossy",
    )
    copies: Literal["inclusive", "exclusive"] = Field(
        default="inclusive",
        description="What device memory holds too: inclusive, stays like all else; exclusive, leaves first once host "
        "is full and is saved again when it leaves the device, for hosts that one engine uses alone",
    )


class NvmeSettings(Section):
    """The NVMe tier."""

    path: FilePath = Field(description="Directory on a local disk, made if absent; processes may share one")
    capacity: Size = Field(
        default=8 * GIB, description="Disk space for KV blocks, a hard limit for all processes together"
    )
    segment_size: Size = Field(default=256 * MIB, description="Size of one preallocated file")
    min_free: AnySize = Field(default=GIB, description="Free disk space that is never used up")
    durable: bool = Field(
        default=False,
        description="Sync every commit: survive power loss, not only the death of the process; slower",
    )
    io_threads: Count = Field(default=4, description="Threads that read and write")
    format: Name = Field(
        default="raw", description="How blocks are encoded here; bitsplit is lossless, lossy ones need accept_lossy"
    )
    write: Literal["through", "leave", "second_touch"] = Field(
        default="through",
        description="When blocks are written: at once, when they are about to leave host, or at their second touch",
    )
    write_budget: Size | None = Field(
        default=None, description="Bytes written per day; while ahead of it, second touch only; none: no limit"
    )


class TieringSettings(Section):
    """Where KV goes when device memory is full or the process ends."""

    host: HostSettings | None = Field(
        default=HostSettings(), description="Host memory, the gateway of all other tiers; none: tiering is off"
    )
    nvme: NvmeSettings | None = Field(default=None, description="NVMe; needs host; on as soon as a path is given")
    remote: RemoteSettings | None = Field(
        default=None, description="A store that machines share; needs host; on as soon as a url is given"
    )
    accept_lossy: bool = Field(
        default=False,
        description="Reuse KV that was stored in a lossy format; outputs may differ",
    )
    load_deadline: Seconds = Field(
        default=10.0, description="Seconds after which a load that does not arrive is a miss"
    )
    admission: str = Field(
        default="second_touch",
        description="Under write = second_touch, what says which blocks are written: second_touch, or module:Class",
    )
    prefetch: str = Field(
        default="none",
        description="Bring a session's KV to host before its next turn is expected: none, next_turn, or module:Class",
    )
    recompute_gate: bool = Field(
        default=True, description="Load only what is measured to be cheaper to load than to recompute"
    )

    @model_validator(mode="after")
    def _host_is_the_gateway(self) -> Self:
        if self.nvme is not None and self.host is None:
            raise conflict(
                "nvme needs host, the gateway between device memory and NVMe; switch host on or nvme off",
                "host",
                "nvme",
            )
        if self.remote is not None and self.host is None:
            raise conflict(
                "remote needs host, the gateway between device memory and other tiers; switch host on or remote off",
                "host",
                "remote",
            )
        if self.remote is not None and self.nvme is not None and self.remote.write not in (None, self.nvme.write):
            raise conflict(
                f"nvme.write = {self.nvme.write!r} and remote.write = {self.remote.write!r}: one rule holds for all "
                "lower tiers; set remote.write to none",
                "nvme.write",
                "remote.write",
            )
        return self


class ServerSettings(Section):
    """The OpenAI-compatible server."""

    host: Name = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 and :: are all addresses")
    port: Port = Field(default=8000, description="TCP port; 0: any free one")
    served_model_name: Name | None = Field(
        default=None, description="What clients call the model; none: the name of its directory or file"
    )
    api_key_file: FilePath | None = Field(
        default=None, description="File of accepted API keys, one a line; none: every caller is served"
    )
    max_waiting: Whole = Field(
        default=64, description="Sequences beyond engine.max_running that may wait; what comes then is refused with 429"
    )
    max_body: Size = Field(default=8 * MIB, description="Size of a request's body, at most")
    drain_timeout: Seconds = Field(
        default=30.0, description="Seconds that requests under way have to end after SIGTERM"
    )
    cors_origins: Name | None = Field(
        default=None, description="Origins of web pages that may call, with commas between; * is every one; none: none"
    )


class LogSettings(Section):
    """Messages on stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="The least that is shown"
    )
    format: Literal["text", "json"] = Field(default="text", description="Lines for people, or one JSON object a line")


class Config(Section):
    """All settings of one process."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    tiering: TieringSettings = TieringSettings()
    server: ServerSettings = ServerSettings()
    service: ServiceSettings = ServiceSettings()
    events: EventsSettings = EventsSettings()
    router: RouterSettings = RouterSettings()
    log: LogSettings = LogSettings()
