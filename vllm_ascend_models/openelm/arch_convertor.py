"""What vLLM reads of an OpenELM configuration: integers, and each layer's own."""

import copy
from typing import Any

from vllm.transformers_utils.model_arch_config_convertor import (
    ModelArchConfigConvertorBase,
)

from vllm_ascend_models.openelm.config import OpenELMConfig


class OpenELMModelArchConfigConvertor(ModelArchConfigConvertorBase):
    """Answers model-wide counts with the maximum over layers.

    vLLM sizes buffers by them, and some of its kernels hang on less. Engines that
    can hear of layers that differ are told through `get_per_layer_hf_configs`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM builds a convertor only for a model that is being served, and before
        # it asks for policies: here ours costs nothing to anyone else.
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from vllm_ascend_models.openelm.policy import OpenELMPolicy
        from vllm_ascend_models.openelm.registration import ARCHITECTURE

        MODELS_CONFIG_MAP[ARCHITECTURE] = OpenELMPolicy

    def get_total_num_attention_heads(self) -> int:
        """Query heads of the widest layer."""
        return max(self.hf_text_config.num_query_heads)

    def get_total_num_kv_heads(self) -> int:
        """KV heads of the widest layer."""
        return max(self.hf_text_config.num_kv_heads)

    def get_per_layer_hf_configs(
        self,
    ) -> list[tuple[OpenELMConfig, OpenELMConfig]] | None:
        """One configuration a layer with that layer's heads (vLLM 0.32 on)."""
        config = self.hf_text_config
        heads = list(zip(config.num_query_heads, config.num_kv_heads, strict=True))
        if len(set(heads)) == 1:
            return None
        layers = [_with_heads(config, q, kv) for q, kv in heads]
        return [(layer, layer) for layer in layers]


def _with_heads(config: OpenELMConfig, q: int, kv: int) -> OpenELMConfig:
    layer = copy.copy(config)
    layer.num_query_heads, layer.num_kv_heads = [q], [kv]
    return layer
