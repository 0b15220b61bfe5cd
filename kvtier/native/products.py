"""Products with constant bfloat16 weights on AMX tiles, where the extension was built and the processor has them.

    packed    [N / 32][K / 32] steps of two tiles, 1 KiB each; a tile holds 32 k of 16 outputs, k in pairs:
              tile[k / 2][output][k % 2]

One walk over the packed weights, in the order of memory, computes a product with up to 32 rows. `KVTIER_NATIVE` other
than `auto` leaves them out.
"""

import importlib
import logging
import os
from functools import cache
from typing import Protocol, cast

__all__ = ["GRAIN", "INTERFACE", "Products", "products"]

log = logging.getLogger(__name__)

INTERFACE = 1
"""Changes with the signatures below; a compiled extension of another number is not used."""

GRAIN = 32
"""Inputs and outputs come in multiples of this."""


class Products(Protocol):
    """The extension. Calls release the GIL."""

    INTERFACE: int
    AVAILABLE: int

    def product(
        self, x: int, packed: int, out: int, rows: int, x_row: int, inputs: int, outputs: int, threads: int, /
    ) -> None:
        """out[rows, outputs] = x[rows, inputs] @ weight.T, summed in float32. All integers.

        x, packed, out: addresses of bfloat16, out contiguous. x_row: elements from one row of x to the next.

        Raises:
            TypeError, ValueError: other arguments, or no AMX here. Nothing was computed.
        """
        ...


@cache
def products() -> Products | None:
    """The extension, if it runs here. Import torch before the first call: its OpenMP runtime is shared."""
    if os.environ.get("KVTIER_NATIVE", "auto") != "auto":
        return None
    try:
        found = cast("Products", importlib.import_module("kvtier.native._products"))
    except ImportError:
        return None
    if found.INTERFACE != INTERFACE:
        log.warning(
            "kvtier.native._products has interface %d, expected %d: using torch; build it again",
            found.INTERFACE,
            INTERFACE,
        )
        return None
    return found if found.AVAILABLE else None
