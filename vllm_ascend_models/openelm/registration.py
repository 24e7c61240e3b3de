"""Tells the running vLLM about OpenELM, by lazy names and without loading it.

Everything imported here is loaded already in a process that calls plugins. What
is not (the policy's registry) is left to the arch convertor, which vLLM calls only
when somebody serves an OpenELM.
"""

ARCHITECTURE = "OpenELMForCausalLM"

_FLOAT16_REASON = (
    "OpenELM's activations exceed float16's range (65504) and overflow. "
    "Use bfloat16, or float32 where the hardware has no bfloat16."
)


def register() -> None:
    """Register configuration, model, arch convertor and the dtype it refuses."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.config import model as model_config
    from vllm.transformers_utils import config as config_registry
    from vllm.transformers_utils import model_arch_config_convertor

    from vllm_ascend_models.openelm.arch_convertor import (
        OpenELMModelArchConfigConvertor,
    )
    from vllm_ascend_models.openelm.config import OpenELMConfig

    model_type = OpenELMConfig.model_type
    # Both registries: with vLLM's alone the tokenizer's own look at config.json
    # fails; with transformers' alone `--trust-remote-code` would run Apple's file.
    AutoConfig.register(model_type, OpenELMConfig, exist_ok=True)
    config_registry._CONFIG_REGISTRY[model_type] = OpenELMConfig
    model_arch_config_convertor.MODEL_ARCH_CONFIG_CONVERTORS[model_type] = (
        OpenELMModelArchConfigConvertor
    )
    model_config._FLOAT16_NOT_SUPPORTED_MODELS[model_type] = _FLOAT16_REASON
    ModelRegistry.register_model(
        ARCHITECTURE, "vllm_ascend_models.openelm.model:OpenELMForCausalLM"
    )
