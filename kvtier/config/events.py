"""Settings of the engine's block events."""

from pydantic import Field

from kvtier.config.fields import MIB, Count, Name, Section, Size

__all__ = ["EventsSettings"]


class EventsSettings(Section):
    """What is in which tier, published over ZMQ as vLLM does it, for routers; subscribers see the prompts' tokens."""

    endpoint: Name | None = Field(
        default=None, description="ZMQ address to publish on, such as tcp://127.0.0.1:5557; none: nothing is published"
    )
    replay_endpoint: Name | None = Field(
        default=None, description="ZMQ address where lost messages can be had again; none: they cannot"
    )
    topic: str = Field(default="", description="First frame of every message")
    buffer: Size = Field(default=64 * MIB, description="Size of the messages that are kept for replay")
    queue: Count = Field(default=100_000, description="Messages that may wait for one slow subscriber")
