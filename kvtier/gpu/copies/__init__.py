"""Copies of device blocks to and from host memory: batched, in the background, decoded on their way in.

engine     CopyEngine: one lane per direction; what fits, and what is told of it
mover      one batch: waits for its event, decodes, launches, waits for the arrival
tickets    CopyTicket: the end of a batch; LayerGate: a load that computing follows layer by layer
"""

from kvtier.gpu.copies.engine import CopyEngine
from kvtier.gpu.copies.mover import BlockMove, Decode
from kvtier.gpu.copies.tickets import CopyTicket, LayerGate
from kvtier.gpu.streams.runs import Direction

__all__ = ["BlockMove", "CopyEngine", "CopyTicket", "Decode", "Direction", "LayerGate"]
