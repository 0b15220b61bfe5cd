"""SGLang's side of a storage backend, without SGLang: host pools in all layouts, ranks, and hashes of pages.

The pools keep the conventions of SGLang 0.5.23's `MHATokenToKVPoolHost` and `MLATokenToKVPoolHost`: shapes by layout,
flat pages, and addresses of ranges computed from strides, as there.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
PAGE, LAYERS, HEADS, DIM, LATENT = 4, 3, 4, 8, 24

# By layout: the axes of a pool behind its planes, as letters; p and t are the page and the token in it.
_AXES = {"layer_first": "lpthd", "page_first": "ptlhd", "page_first_direct": "plthd", "page_head": "phtld"}


@dataclass
class FakeRank:
    """What SGLang's `HiCacheStorageConfig` says."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "some/model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False


class FakePool:
    """A host pool: `buffer` is [planes, ...] in the order of the layout, or without planes for MLA."""

    def __init__(
        self,
        layout: str,
        *,
        mla: bool = False,
        pages: int = 12,
        heads: int = HEADS,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.layout, self.page_size, self.dtype = layout, PAGE, dtype
        self.layer_num, self.start_layer = LAYERS, 0
        if mla:
            self.kv_cache_dim = LATENT
        else:
            self.head_num, self.head_dim, self.v_head_dim = heads, DIM, DIM
        extent = {"p": pages, "t": PAGE, "l": LAYERS, "h": 1 if mla else heads, "d": LATENT if mla else DIM}
        self._planes = 1 if mla else 2
        self.buffer = torch.zeros([self._planes, *(extent[axis] for axis in _AXES[layout])], dtype=dtype)
        self._page_axis = 1 + _AXES[layout].index("p")

    def page(self, number: int) -> Tensor:
        """One page, a view: [planes, ...] without the page's axis."""
        return self.buffer.select(self._page_axis, number)

    def fill(self, number: int, seed: object) -> None:
        """Give a page bits that only this seed has, every plane, layer, token and head its own."""
        page = self.page(number)
        nbytes = page.numel() * page.element_size()
        page.copy_(torch.frombuffer(bytearray(noise(seed, nbytes)), dtype=self.dtype).reshape(page.shape))

    def bits(self, number: int) -> bytes:
        """The page's bytes, flat."""
        return self.page(number).contiguous().view(torch.uint8).numpy().tobytes()

    # ---- what a storage backend calls

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        return self.page(index // PAGE).flatten()

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.zeros_like(self.page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        page = self.page(index // PAGE)
        page.copy_(data_page.reshape(page.shape))

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        return self._ranges(indices, 1)

    def get_split_heads_page_buffer_meta(self, indices: Tensor, split_factor: int) -> tuple[list[int], list[int]]:
        assert self.layout == "page_head"
        return self._ranges(indices, split_factor)

    def _ranges(self, indices: Tensor, split: int) -> tuple[list[int], list[int]]:
        assert len(indices) % PAGE == 0
        places, sizes = [], []
        for first in indices.tolist()[::PAGE]:
            page = self.page(first // PAGE)
            # K and V of each layer where layers lie apart, else of each slice of the heads.
            rows = page.unbind(1) if self.layout == "layer_first" else page.chunk(split, 1)
            for row in rows:
                assert row[0].is_contiguous()
                places += [plane.data_ptr() for plane in row]
                sizes += [plane.numel() * plane.element_size() for plane in row]
        return places, sizes


def slots(pages: Sequence[int]) -> Tensor:
    """The token slots of these pages."""
    return torch.cat(
        [torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages] or [torch.empty(0, dtype=torch.long)]
    )


def hashes(chain: object, count: int) -> list[str]:
    """Hashes of a chain's pages, as SGLang makes them: sha256(parent, tokens as uint32le), in hex."""
    made, parent = [], b""
    seed = int.from_bytes(hashlib.sha256(repr(chain).encode()).digest()[:3], "little")
    for page in range(count):
        tokens = torch.arange(seed + page * PAGE, seed + (page + 1) * PAGE, dtype=torch.int32).numpy().astype("<u4")
        parent = hashlib.sha256(parent + tokens.tobytes()).digest()
        made.append(parent.hex())
    return made


def noise(seed: object, nbytes: int) -> bytes:
    """Bytes that only this seed has; as 16-bit floats none of them is a NaN."""
    stream = hashlib.shake_128(repr(seed).encode()).digest(nbytes)
    return bytes(byte & 0x3F for byte in stream)
