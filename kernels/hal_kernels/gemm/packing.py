"""Weight layouts of the generated kernels. See `jit_float` and `jit_int8` for what they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hal_kernels.gemm.jit_panel import PanelEpilogue
from hal_kernels.weight_memory import place_weight


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """Which output channel stands where: panels of 2*lanes channels.

    Gated: the first half of a panel holds gate channels and the second half the up channels that
    belong to them, so that a block has both in registers. Channels beyond the last are zero.
    """

    n: int
    lanes: int
    epilogue: PanelEpilogue

    @property
    def out_features(self) -> int:
        return self.n // 2 if self.epilogue == "silu_gated" else self.n

    @property
    def out_width(self) -> int:
        """Output columns of a panel."""
        return self.lanes if self.epilogue == "silu_gated" else 2 * self.lanes

    @property
    def num_panels(self) -> int:
        return -(-self.out_features // self.out_width)

    @property
    def tail(self) -> int:
        """Output columns of the last panel."""
        return self.out_features - (self.num_panels - 1) * self.out_width

    def arrange(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [panels, 2*lanes, ...]."""
        padding = self.num_panels * self.out_width - self.out_features

        def pad(part: torch.Tensor) -> torch.Tensor:
            if not padding:
                return part
            return torch.cat((part, part.new_zeros(padding, *part.shape[1:])))

        shape = (self.num_panels, self.out_width, *rows.shape[1:])
        if self.epilogue == "silu_gated":
            gate, up = rows.chunk(2)
            return torch.cat((pad(gate).view(shape), pad(up).view(shape)), dim=1)
        return pad(rows.contiguous()).view(shape)

    def columns_first(self, weight: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [panels, C, 2*lanes]."""
        return place_weight(self.arrange(weight).transpose(1, 2))


def refuse_rows(x: torch.Tensor, k: int) -> None:
    """Raise for activations that a generated kernel, which sees only an address, would misread.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"generated GEMM: required x float32 [T, {k}] with unit stride along K, "
        f"found {x.dtype} {list(x.shape)} with strides {x.stride()}"
    )


def pack_dot_int8(layout: PanelLayout, data: torch.Tensor) -> torch.Tensor:
    """int8 [N, K] -> [panels, ceil(K/4), 2*lanes, 4]; K padded with zeros."""
    padded = torch.nn.functional.pad(data, (0, -data.shape[1] % 4))
    quads = layout.arrange(padded).view(layout.num_panels, 2 * layout.lanes, -1, 4)
    return place_weight(quads.permute(0, 2, 1, 3))


def pack_dot_int4(layout: PanelLayout, data: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2] (low nibble: even k) -> [panels, K/8, 2*lanes, 4].

    Byte j of a group of 4 holds k = 8i + j in its low nibble and k = 8i + 4 + j in its high one.
    """
    n = data.shape[0]
    values = torch.stack((data & 15, data >> 4), dim=-1).view(n, -1, 2, 4)
    packed = (values[:, :, 0] | (values[:, :, 1] << 4)).view(n, -1)
    quads = layout.arrange(packed).view(layout.num_panels, 2 * layout.lanes, -1, 4)
    return place_weight(quads.permute(0, 2, 1, 3))
