"""The lossy formats. K, or the latent of an MLA cache, gets the bits: attention scores hang on it; V is cheap.

Sizes are those of bf16 blocks with one float16 scale (and low, for int4) per token and head.
"""

from kvtier.formats.rows import FLOATS, Field, RowFormat
from kvtier.layout import GroupKind, LayerGroup
from kvtier.native.rows import Codec

__all__ = [
    "Fp8Format",
    "Int4RotatedFormat",
    "Int8Format",
    "Int8RotatedFormat",
    "K8V4Format",
    "Mla4Format",
    "Mla8Format",
]


class Int8Format(RowFormat):
    """int8, symmetric per token and head. 1.94 times smaller at head_dim 64, 1.97 at 128."""

    id = sink = "int8"
    fidelity = 85

    def fields(self, chosen: LayerGroup) -> tuple[Field, Field]:
        """K and V alike."""
        return Field(Codec.INT8), Field(Codec.INT8)


class Int8RotatedFormat(RowFormat):
    """int8 with K rotated: a third of the error of `int8` at the same size."""

    id = sink = "int8r"
    fidelity = 90

    def fields(self, chosen: LayerGroup) -> tuple[Field, Field]:
        """K rotated, V as it is."""
        return Field(Codec.INT8, rotation=0), Field(Codec.INT8)


class Fp8Format(RowFormat):
    """float8_e4m3fn with a scale per token and head; what already is float8_e4m3fn passes through untouched."""

    id = sink = "fp8"
    fidelity = 80
    dtypes = (*FLOATS, "float8_e4m3fn")

    def fields(self, chosen: LayerGroup) -> tuple[Field, Field]:
        """K and V alike."""
        one = Field(Codec.COPY if chosen.dtype == "float8_e4m3fn" else Codec.FP8)
        return one, one


class K8V4Format(RowFormat):
    """K int8, V int4 asymmetric and rotated. 2.51 times smaller at head_dim 64, 2.59 at 128."""

    id = "k8v4"
    fidelity = 70
    sink = "int8r"

    def fields(self, chosen: LayerGroup) -> tuple[Field, Field]:
        """K int8, V int4."""
        return Field(Codec.INT8), Field(Codec.INT4, rotation=0)


class Int4RotatedFormat(RowFormat):
    """int4, asymmetric, K and V rotated. 3.56 times smaller at head_dim 64, 3.76 at 128."""

    id = "int4r"
    fidelity = 60
    sink = "int8r"

    def fields(self, chosen: LayerGroup) -> tuple[Field, Field]:
        """K and V alike."""
        return Field(Codec.INT4, rotation=0), Field(Codec.INT4, rotation=0)


class Mla8Format(RowFormat):
    """MLA: latent int8 in groups of 128, rope key int8. 1.97 times smaller."""

    id = sink = "mla8"
    fidelity = 85
    kind = GroupKind.MLA

    def fields(self, chosen: LayerGroup) -> tuple[Field, Field]:
        """Latent and rope key."""
        return Field(Codec.INT8, group=128), Field(Codec.INT8)


class Mla4Format(RowFormat):
    """MLA: latent rotated, 4 bits (Lloyd-Max) in groups of 64, rope key int8. 3.41 times smaller.

    The levels are a Gaussian's and the rotation makes the groups Gaussian (TurboQuant, Zandieh et al. 2025), which
    saves the second float16 of `int4r` at the same error.
    """

    id = "mla4"
    fidelity = 60
    sink = "mla8"
    kind = GroupKind.MLA

    def fields(self, chosen: LayerGroup) -> tuple[Field, Field]:
        """Latent and rope key."""
        return Field(Codec.LLOYD4, group=64, rotation=64), Field(Codec.INT8)
