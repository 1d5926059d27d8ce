"""What a model takes: parameters, bytes of weights, bytes of cache, counted from its calls.

Counted are the parameters that a step of the planned layers uses: layers for speculative decoding,
vision towers and routing tables by token id are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hal.ops import CATALOGUE
from hal.ops.embedding import EmbeddingRequest
from hal.ops.engram import EngramRequest
from hal.ops.formats import DTYPE_BYTES
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.hyper_connection import HyperConnectionRequest
from hal.ops.kv_compressor import KvCompressorRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.moe_router import MoeRouterRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest
from hal.plan import OpSite
from hal_engine.config import ModelConfig
from hal_engine.kv_choice import row_bytes
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import Precision

_LIMITS = StepLimits(max_num_batched_tokens=1, max_num_seqs=1, block_size=64)
# A norm over query heads that has no weight.
_WEIGHTLESS = frozenset({"layers.*.q_head_norm"})
_FLOAT32_BYTES = 4


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the layers that a plan has, whatever format they are stored in."""
    precision = Precision(
        name="bf16",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        kv_format="bf16",
        window_format="bf16",
        index_format="bf16",
    )
    sites = _with_weights(model_sites(config, precision, _LIMITS))
    return sum(_parameters(config, site) * max(1, len(site.layers)) for site in sites)


def weight_bytes(config: ModelConfig, precision: Precision, world_size: int = 1) -> int:
    """Bytes of the weights in the precision's formats, on the rank that holds most of them."""
    per_rank = [0] * world_size
    for site in _with_weights(model_sites(config, precision, _LIMITS, world_size)):
        size = _site_bytes(config, site) * max(1, len(site.layers))
        for rank in site.ranks:
            per_rank[rank] += size
    return max(per_rank)


def kv_bytes_per_token(config: ModelConfig, precision: Precision) -> int:
    """Bytes that one token more of context takes over all layers, each cache counted once.

    A window costs nothing more once it is full: see kv_bytes_per_sequence.
    """
    mla, indexer = config.mla, config.indexer
    if mla is not None:
        index = 0
        if indexer is not None:
            index = len(indexer.layers) * row_bytes(precision.index_format, indexer.head_dim)
        return config.num_layers * row_bytes(precision.kv_format, mla.row_width) + index
    attention = config.compressed
    if attention is not None:
        index_row = row_bytes(precision.index_format, indexer.head_dim) if indexer else 0
        own = [layer for layer in range(config.num_layers) if attention.compresses(layer)]
        indexed = set(own) & set(indexer.layers if indexer else ())
        main_row = row_bytes(precision.kv_format, config.head_dim)
        total = sum(
            (main_row + (index_row if layer in indexed else 0)) / attention.ratios[layer]
            for layer in own
        )
        return round(total)
    row = 2 * config.num_key_value_heads * config.head_dim
    return config.num_layers * row * DTYPE_BYTES[precision.kv_dtype]


def kv_bytes_per_sequence(config: ModelConfig, precision: Precision) -> int:
    """Bytes that a sequence takes however long it is: windows and open states of compressors."""
    attention = config.compressed
    if attention is None:
        return 0
    windows = config.num_layers * attention.window
    total = windows * row_bytes(precision.window_format, config.head_dim)
    for site in model_sites(config, precision, _LIMITS):
        request = site.request
        if isinstance(request, KvCompressorRequest):
            state = request.state_rows * 2 * request.width * _FLOAT32_BYTES
            total += state * len(site.layers)
    return total


def kv_copies(config: ModelConfig, world_size: int) -> int:
    """How many ranks keep a row of the cache: all of them where all heads read the same rows, else
    those that share a key-value head."""
    if config.mla is not None or config.compressed is not None:
        return world_size
    return max(1, world_size // config.num_key_value_heads)


def _with_weights(sites: list[OpSite]) -> Iterator[OpSite]:
    """Each weight once: a site of two phases has one weight, in its decode request."""
    return (site for site in sites if site.request.phase != "prefill")


def _parameters(config: ModelConfig, site: OpSite) -> int:
    request = site.request
    if site.site == "lm_head" and config.tie_word_embeddings:
        return 0
    if request.op == "compressed_attention":
        return config.num_attention_heads  # sinks
    if site.site in _WEIGHTLESS:
        return 0
    if isinstance(request, KvCompressorRequest):
        has_position_bias = config.family == "deepseek_v4"
        return request.head_dim + (request.ratio * request.width if has_position_bias else 0)
    count = _COUNTS.get(type(request))
    return 0 if count is None else count(request)


def _hyper_connection(request: HyperConnectionRequest) -> int:
    """The projection to mixes with a bias each, and a scale for each kind of mix."""
    if request.kind == "post" or (request.kind == "head" and request.is_lagged):
        return 0
    scales = 1 if request.kind == "head" else 3
    return request.num_mixes * (request.num_streams * request.hidden_size + 1) + scales


def _engram(request: EngramRequest) -> int:
    if request.kind == "gather":
        return request.table_rows * request.row_width
    return 2 * request.num_streams * request.hidden_size


_COUNTS: dict[type[OpRequest], Callable[[Any], int]] = {
    EmbeddingRequest: lambda r: r.vocab_size * r.hidden_size,
    GemmRequest: lambda r: r.n * r.k + (r.n if r.has_bias else 0),
    GroupedGemmRequest: lambda r: r.num_experts * r.n * r.k,
    RmsNormRequest: lambda r: r.hidden_size,
    LayerNormRequest: lambda r: r.hidden_size * (2 if r.has_bias else 1),
    MoeRouterRequest: lambda r: r.num_experts if r.has_bias else 0,
    HyperConnectionRequest: _hyper_connection,
    EngramRequest: _engram,
}


def _site_bytes(config: ModelConfig, site: OpSite) -> int:
    """As stored for what has a weight format; norms in the activations' dtype, the rest float32."""
    request = site.request
    if site.site == "lm_head" and config.tie_word_embeddings:
        return 0
    stored = CATALOGUE[request.op].weight_bytes(request)
    if isinstance(request, GemmRequest) and request.has_bias:
        return stored + request.n * DTYPE_BYTES[request.dtype]
    if stored:
        return stored
    width = _FLOAT32_BYTES
    if isinstance(request, RmsNormRequest | LayerNormRequest):
        width = DTYPE_BYTES[request.dtype]
    return _parameters(config, site) * width
