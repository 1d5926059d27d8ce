"""Binds norm, rope, gated activation, embedding, KV write and the sampling filter."""

from __future__ import annotations

from typing import Any

import torch

from hal.candidates import Bind, Kernel
from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest
from hal_opencl.memory import Changed, Fresh, Launcher, memory_of


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 constant that begins its storage, as kernels take constants."""
    plain = tensor.float().contiguous()
    return plain if plain.storage_offset() == 0 else plain.clone()


def load_norm(device: DeviceSpec) -> Bind:
    memory = memory_of(device)

    def bind(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Kernel:
        size, has_residual = request.hidden_size, request.has_residual
        kernel = memory.device.kernel("norm.cl", "rms_norm", {"HAS_RESIDUAL": int(has_residual)})
        weight = own_copy(weight)
        launch = Launcher(memory, kernel, memory.constant(weight))

        def run(x: torch.Tensor, residual: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            rows = x.numel() // size
            launch((rows,), float(eps), size, x, residual, Fresh(total), Fresh(y))
            return y

        def norm(x: torch.Tensor) -> torch.Tensor:
            x = x.contiguous()
            return run(x, x, weight)  # neither residual nor sum is touched

        def norm_residual(x: torch.Tensor, residual: torch.Tensor) -> Any:
            total = torch.empty(x.shape)
            return run(x.contiguous(), residual.contiguous(), total), total

        return norm_residual if has_residual else norm

    return bind


def load_rope(device: DeviceSpec) -> Bind:
    memory = memory_of(device)

    def bind(request: RopeRequest, *, cos_sin_cache: torch.Tensor) -> Kernel:
        defines = {
            "HALF": request.rotary_dim // 2,
            "NUM_HEADS": request.num_heads,
            "NUM_KV_HEADS": request.num_kv_heads,
            "HEAD_DIM": request.head_dim,
            "INTERLEAVED": int(request.style == "interleaved"),
            "START": request.rotary_start,
            "INVERSE": int(request.is_inverse),
        }
        kernel = memory.device.kernel("rope.cl", "rope", defines)
        launch = Launcher(memory, kernel, memory.constant(own_copy(cos_sin_cache)))

        def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
            tokens = q.shape[0]
            if not request.num_kv_heads:
                k = q  # there is none, and the kernel does not look at it
            launch((tokens,), Changed(q), q.stride(0), Changed(k), k.stride(0), positions)

        return rope

    return bind


def load_activation(device: DeviceSpec) -> Bind:
    memory = memory_of(device)

    def bind(request: GatedActivationRequest) -> Kernel:
        defines = {
            "GELU": int(request.activation == "gelu_tanh"),
            "CLAMP": int(bool(request.clamp)),
        }
        launch = Launcher(
            memory, memory.device.kernel("activation.cl", "gated_activation", defines)
        )

        def activation(x: torch.Tensor) -> torch.Tensor:
            y = x.new_empty((x.shape[0], request.width))
            clamp = float(request.clamp)
            launch((x.shape[0],), request.width, clamp, x, x.stride(0), Fresh(y))
            return y

        return activation

    return bind


def load_embedding(device: DeviceSpec) -> Bind:
    memory = memory_of(device)

    def bind(request: EmbeddingRequest, *, weight: torch.Tensor) -> Kernel:
        kernel = memory.device.kernel("rows.cl", "embedding")
        launch = Launcher(memory, kernel, memory.constant(own_copy(weight)))

        def embedding(ids: torch.Tensor) -> torch.Tensor:
            y = torch.empty((ids.shape[0], request.hidden_size))
            launch((ids.shape[0],), request.hidden_size, ids, Fresh(y))
            return y

        return embedding

    return bind


def load_kv_write(device: DeviceSpec) -> Bind:
    memory = memory_of(device)

    def bind(request: KvWriteRequest) -> Kernel:
        launch = Launcher(memory, memory.device.kernel("rows.cl", "kv_write"))
        k_size = request.num_kv_heads * request.head_dim
        v_size = request.num_kv_heads * request.v_head_dim

        def kv_write(
            k: torch.Tensor,
            v: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
        ) -> None:
            rows = (k_size, v_size, k, k.stride(0), v, v.stride(0))
            launch((k.shape[0],), *rows, Changed(k_cache), Changed(v_cache), slot_mapping)

        return kv_write

    return bind


def load_top_k_top_p(device: DeviceSpec) -> Bind:
    memory = memory_of(device)

    def bind(request: TopKTopPRequest) -> Kernel:
        launch = Launcher(memory, memory.device.kernel("sampling.cl", "top_k_top_p"))

        def top_k_top_p(
            logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
        ) -> torch.Tensor:
            y = torch.empty(logits.shape)
            rows = (logits, logits.stride(0))
            launch((logits.shape[0],), request.vocab_size, *rows, top_k, top_p, Fresh(y))
            return y

        return top_k_top_p

    return bind
