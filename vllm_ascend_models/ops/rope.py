"""Llama 3's rotary embedding through the one kernel that an NPU has for plain RoPE.

vllm-ascend replaces vLLM's rotary embeddings by class name, and has no entry for
``Llama3RotaryEmbedding``: its scaled frequencies would run as a dozen small kernels a
layer. Only the table of cosines and sines differs from plain RoPE, and that is made by
the class itself, so the kernel fits as it is.
"""

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding

NAME = Llama3RotaryEmbedding.__name__


class NPULlama3RotaryEmbedding(Llama3RotaryEmbedding):
    """`Llama3RotaryEmbedding` on ``_npu_rotary_embedding``, in place.

    Source of the formula: ``rope_type`` "llama3" of transformers'
    ``modeling_rope_utils.py``, as the base class computes it.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # What vllm-ascend's own rotary embeddings keep, and look at in `forward_oot`.
        speculative = get_current_vllm_config().speculative_config
        self.use_mtp = speculative is not None and speculative.method == "mtp"

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate ``[num_tokens, heads * head_size]`` at ``[num_tokens]`` positions."""
        from vllm_ascend.ops.rotary_embedding import AscendRotaryEmbedding

        return AscendRotaryEmbedding.forward_oot(self, positions, query, key, offsets)


def register() -> None:
    """Have vLLM build this class for every `Llama3RotaryEmbedding`."""
    CustomOp.register_oot(_decorated_op_cls=NPULlama3RotaryEmbedding, name=NAME)
