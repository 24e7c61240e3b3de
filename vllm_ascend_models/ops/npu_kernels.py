"""The kernels that vllm-ascend launches for each layer of vLLM, and what is safe there.

Source: vllm_ascend/ops/{layernorm,activation,rotary_embedding,linear,
vocab_parallel_embedding}.py and attention/attention_v1.py of vllm-ascend 0.23.0. On the
emulated NPU a test compares it with what is launched.
"""

from collections.abc import Iterable

_MATMUL = ("aten::matmul",)
_ROPE = ("atb::_npu_rotary_embedding",)

# By vLLM's class; a layer that is not here has no NPU kernel that we know of.
KERNELS: dict[str, tuple[str, ...]] = {
    "Attention": (
        "atb::_npu_reshape_and_cache",
        "npu::npu_fused_infer_attention_score",
    ),
    "ColumnParallelLinear": _MATMUL,
    "Llama3RotaryEmbedding": _ROPE,
    "LogitsProcessor": _MATMUL,
    "MergedColumnParallelLinear": _MATMUL,
    "QKVParallelLinear": _MATMUL,
    "RMSNorm": ("npu::npu_rms_norm", "_C_ascend::npu_add_rms_norm_bias"),
    "ReplicatedLinear": _MATMUL,
    "RotaryEmbedding": _ROPE,
    "RowParallelLinear": _MATMUL,
    "SiluAndMul": ("npu::npu_swiglu",),
    "VocabParallelEmbedding": ("aten::embedding",),
}
_SAFE_NAMESPACES = {"_C_ascend", "aten", "atb", "npu"}


def unsafe(kernels: Iterable[str]) -> list[str]:
    """Those of the kernels that are CUDA's or Triton's, or of unknown origin."""
    return sorted(
        name
        for name in kernels
        if name.partition("::")[0] not in _SAFE_NAMESPACES or "triton" in name
    )
