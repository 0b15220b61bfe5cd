"""A device's streams, events and copies, and the host's lanes: one seam, three ways to fill it."""

import logging
from importlib import import_module
from importlib.util import find_spec

import torch

from kvtier.gpu.streams.base import Event, Flag, HostWork, Lane, Stream, Streams
from kvtier.gpu.streams.host import HostStreams
from kvtier.gpu.streams.runs import Direction, Runs, address_of
from kvtier.gpu.streams.threads import ThreadLane

__all__ = [
    "Direction",
    "Event",
    "Flag",
    "HostStreams",
    "HostWork",
    "Lane",
    "Runs",
    "Stream",
    "Streams",
    "ThreadLane",
    "address_of",
    "make_streams",
]

_log = logging.getLogger(__name__)


def make_streams(device: torch.device) -> Streams:
    """The streams of a device: CuPy's where it is installed and sees the device, otherwise torch's."""
    if device.type == "cpu":
        return HostStreams()
    with_cupy = find_spec("cupy") is not None and _cupy_works()
    module = import_module("kvtier.gpu.streams.cupy_streams" if with_cupy else "kvtier.gpu.streams.torch_streams")
    streams: Streams = (module.CupyStreams if with_cupy else module.TorchStreams)(device)
    return streams


def _cupy_works() -> bool:
    try:
        return bool(import_module("cupy").is_available())
    except ImportError as error:  # as where its CUDA is another one's, or not there
        _log.warning("cupy cannot be imported, copies go by torch's streams: %s", error)
        return False
