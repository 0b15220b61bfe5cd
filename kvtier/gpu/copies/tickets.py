"""What a submitter holds of copies under way: their end, and the arrival of each layer."""

from kvtier.errors import TierTimeout
from kvtier.gpu.streams.base import Event, Flag, Streams

__all__ = ["CopyTicket", "LayerGate"]


class CopyTicket:
    """A submitted batch of copies.

    Attributes:
        total: copies of the batch.
        good: leading copies that were made; final once `done`.
        seconds: what they took, without waiting for their turn.

    Args:
        total: see above.
        ended: set by `finish`.
    """

    __slots__ = ("_ended", "good", "seconds", "total")

    def __init__(self, total: int, ended: Flag) -> None:
        self.total = total
        self.good = 0
        self.seconds = 0.0
        self._ended = ended

    @property
    def done(self) -> bool:
        """Whether the batch has ended, well or not. Never blocks."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Block until the batch has ended; returns `good`.

        Raises:
            TierTimeout: `timeout` seconds passed. The copies go on.
        """
        if not self._ended.wait(timeout):
            raise TierTimeout(f"{self.total} copies have not ended within {timeout} s; wait again")
        return self.good

    def finish(self, good: int, seconds: float) -> None:
        """Called once, by the lane."""
        self.good = good
        self.seconds = seconds
        self._ended.set()


class LayerGate:
    """A load that is waited for layer by layer, while later layers are still on their way.

        lane      copies of layer 0, event, opens 0 | copies of layer 1, event, opens 1 | ...
        compute   wait(0), attention of layer 0      | wait(1), attention of layer 1     | ...

    After each layer is its own event, which there is only once the lane has got to it: so `wait` holds up the thread
    until the copies of the layer were launched, and the compute stream until they have arrived.

    Args:
        streams: of the device.
        layers: slices of a block, at least 1.
    """

    def __init__(self, streams: Streams, layers: int) -> None:
        self.layers = layers
        self._streams = streams
        self._arrivals: list[Event] = [None] * layers
        self._open = [streams.flag() for _ in range(layers)]

    def open(self, layer: int, arrival: Event) -> None:
        """The layer's copies were launched; `arrival` comes after them. Called by the lane."""
        self._arrivals[layer] = arrival
        self._open[layer].set()

    def open_rest(self) -> None:
        """The load has ended, well or not: layers that did not come hold up nobody. Called by the lane."""
        for flag in self._open:
            flag.set()

    def wait(self, layer: int) -> None:
        """What the calling thread launches from now on comes after the layer's copies, unless the load failed."""
        self._open[layer].wait()
        arrival = self._arrivals[layer]
        if arrival is not None:
            self._streams.wait(self._streams.compute(), arrival)
