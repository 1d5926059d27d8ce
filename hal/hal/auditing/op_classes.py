"""Which class of work an op of torch's dispatcher is: the one table from op names to classes.

Names are "namespace::name" without overload. What the table does not know is judged by the words
of its name, so that an op of somebody's extension is an attention or a product as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hal.auditing.trace import OpClass

_ATTENTION = (
    "scaled_dot_product_attention _scaled_dot_product_attention_math "
    "_scaled_dot_product_attention_math_for_mps _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable "
    "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward "
    "_scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention_backward "
    "_scaled_dot_product_fused_attention_overrideable_backward _flash_attention_backward "
    "_efficient_attention_backward _cudnn_attention_backward _native_multi_head_attention "
    "_transformer_encoder_layer_fwd _triton_scaled_dot_attention _triton_multi_head_attention"
)
_GEMM = (
    "mm bmm addmm baddbmm addbmm addmv mv dot vdot linear matmul einsum _int_mm _scaled_mm "
    "_scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 _weight_int8pack_mm "
    "_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros "
    "_dyn_quant_matmul_4bit mkldnn_linear _addmm_activation _trilinear _cdist_forward "
    "_sparse_semi_structured_mm _sparse_semi_structured_addmm _sparse_semi_structured_linear "
    "_sparse_mm _sparse_addmm sspaddmm lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer "
    "mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward miopen_rnn _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell linear_backward mkldnn_linear_backward _wrapped_linear_prepack"
)
_CONVOLUTION = (
    "convolution _convolution convolution_overrideable convolution_backward conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution mkldnn_convolution "
    "cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu "
    "miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution "
    "_slow_conv2d_forward _slow_conv2d_backward slow_conv3d_forward _conv_depthwise2d "
    "conv_depthwise3d slow_conv_transpose2d slow_conv_transpose3d slow_conv_dilated2d "
    "slow_conv_dilated3d thnn_conv2d _nnpack_spatial_convolution"
)
_NORM = (
    "native_layer_norm layer_norm native_layer_norm_backward native_group_norm group_norm "
    "native_group_norm_backward native_batch_norm batch_norm native_batch_norm_backward "
    "cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _native_batch_norm_legit_functional "
    "_batch_norm_with_update _batch_norm_no_update batch_norm_backward _batch_norm_impl_index "
    "rms_norm _fused_rms_norm _fused_rms_norm_backward instance_norm renorm _weight_norm_interface"
)
_ACTIVATION = (
    "gelu gelu_ gelu_backward silu silu_ silu_backward relu relu_ relu6 sigmoid sigmoid_ "
    "sigmoid_backward tanh tanh_ tanh_backward threshold_backward hardswish hardswish_ "
    "hardsigmoid hardtanh hardtanh_ mish leaky_relu leaky_relu_ leaky_relu_backward elu elu_ "
    "selu celu softplus glu glu_backward prelu _prelu_kernel softmax _softmax log_softmax "
    "_log_softmax _softmax_backward_data _log_softmax_backward_data _masked_softmax _safe_softmax "
    "native_dropout native_dropout_backward dropout dropout_ feature_dropout alpha_dropout"
)
_EMBEDDING = (
    "embedding _embedding_bag embedding_bag _embedding_bag_forward_only embedding_dense_backward "
    "embedding_backward embedding_renorm_"
)
_SAMPLING = (
    "multinomial argmax argmin topk sort argsort exponential_ _gumbel_softmax kthvalue "
    "searchsorted bucketize"
)
_COPY = (
    "_to_copy copy_ copy clone contiguous cat concat stack index_select gather index index_put "
    "index_put_ index_copy index_copy_ _index_put_impl_ _unsafe_index _unsafe_index_put scatter "
    "scatter_ repeat repeat_interleave constant_pad_nd roll flip take take_along_dim _copy_from "
    "_copy_from_and_resize narrow_copy slice_scatter select_scatter diagonal_scatter masked_select "
    "lift_fresh lift_fresh_copy lift _pin_memory expand_copy permute_copy transpose_copy t_copy "
    "view_copy slice_copy select_copy unsqueeze_copy squeeze_copy _reshape_copy "
    "split_with_sizes_copy "
    "_foreach_copy_ _chunk_cat reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d channel_shuffle pixel_shuffle _local_scalar_dense im2col col2im"
)
_REDUCTION = (
    "sum mean amax amin max min prod any all var var_mean std std_mean logsumexp norm "
    "linalg_vector_norm nansum aminmax count_nonzero median mode cumsum cumprod cummax cummin "
    "nonzero unique_dim _unique2 bincount histc nll_loss_forward nll_loss2d_forward mse_loss "
    "_foreach_norm max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d"
)
_OTHER = (
    "empty empty_strided empty_like new_empty new_empty_strided zeros ones full arange detach "
    "alias "
    "view _unsafe_view reshape t transpose permute expand slice select unsqueeze squeeze split "
    "split_with_sizes chunk unbind as_strided resize_ set_ scalar_tensor rand randn randint"
)


def _of(words: str, op_class: OpClass) -> dict[str, OpClass]:
    return {f"aten::{name}": op_class for name in words.split()}


OP_CLASSES: Final[Mapping[str, OpClass]] = {
    **_of(_OTHER, "other"),
    **_of(_REDUCTION, "reduction"),
    **_of(_COPY, "copy"),
    **_of(_SAMPLING, "sampling"),
    **_of(_EMBEDDING, "embedding"),
    **_of(_ACTIVATION, "activation"),
    **_of(_NORM, "norm"),
    **_of(_CONVOLUTION, "convolution"),
    **_of(_GEMM, "gemm"),
    **_of(_ATTENTION, "attention"),
}
FUSED_ATTENTION: Final = frozenset(
    f"aten::{name}"
    for name in _ATTENTION.split()
    if name not in ("scaled_dot_product_attention",) and "backward" not in name
)
"""Ops that are one backend of attention: seeing one says which backend ran."""
ATTENTION_MATH: Final = "aten::_scaled_dot_product_attention_math"
COLLECTIVE_NAMESPACES: Final = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "symm_mem"}
)
LIBRARY_NAMESPACES: Final = frozenset({"mkldnn", "mkl", "onednn", "quantized", "_quantized"})

# Words in the name of an op that the table does not have, by class; the first that fits decides.
_WORDS: Final[tuple[tuple[OpClass, tuple[str, ...]], ...]] = (
    ("collective", ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter")),
    ("attention", ("attention", "attn", "flash_fwd", "fmha", "mha_fwd", "mha_bwd", "varlen_fwd")),
    ("convolution", ("conv",)),
    ("gemm", ("gemm", "matmul", "linear", "grouped_mm", "scaled_mm", "_mm", "fused_moe", "lstm")),
    ("norm", ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "group_norm", "batch_norm")),
    ("embedding", ("embedding",)),
    ("activation", ("silu", "gelu", "relu", "softmax", "swiglu", "dropout")),
    ("sampling", ("sampl", "top_k", "topk", "top_p")),
    ("copy", ("copy", "clone", "gather", "scatter", "reshape_and_cache")),
)


def classify(name: str, *, is_pointwise: bool = False) -> OpClass:
    """The class of an op or kernel; is_pointwise: what torch's own tag says of it."""
    known = OP_CLASSES.get(name)
    if known is not None:
        return known
    namespace, _, base = name.rpartition("::")
    if namespace in COLLECTIVE_NAMESPACES:
        return "collective"
    if is_pointwise:
        return "elementwise"
    if namespace in ("aten", "prims"):
        return "convolution" if "convolution" in base else _classify_aten(base)
    return _by_words(base or name)


def _classify_aten(base: str) -> OpClass:
    """Of in-place and foreach variants, and of what torch has no tag for."""
    bare = OP_CLASSES.get(f"aten::{base.removesuffix('_')}")
    if bare is not None:
        return bare
    if base.startswith(("_foreach_", "_fused_")):
        return "elementwise"
    if base.startswith(("_fft", "linalg_")):
        return "other"
    if base.startswith(("masked_", "fill", "where", "clamp", "lerp", "add", "mul", "tril", "triu")):
        return "elementwise"
    return "other"


def _by_words(text: str) -> OpClass:
    lowered = text.lower()
    for op_class, words in _WORDS:
        if any(word in lowered for word in words):
            return op_class
    return "other"


# Looked into by who tracks: what they are made of is what ran.
_COMPOSITES = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _convolution "
    "lstm gru rnn_tanh rnn_relu"
)
_MADE_OF_TRACKED: Final = frozenset(f"aten::{name}" for name in _COMPOSITES.split())
_TRACKED_CLASSES = ("attention", "gemm", "convolution", "collective", "embedding")


def is_tracked(name: str) -> bool:
    """Whether an op is a matrix product, attention, a gather of embeddings or a collective."""
    namespace = name.partition("::")[0]
    if namespace in COLLECTIVE_NAMESPACES or namespace in LIBRARY_NAMESPACES:
        return True
    return OP_CLASSES.get(name) in _TRACKED_CLASSES and name not in _MADE_OF_TRACKED
