"""What OpenELM sets and refuses in a vLLM configuration, before weights load.

Changes only what was left at its default, one log line each; what cannot work is
an error here, in the process that the user started.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from vllm_ascend_models import _compat
from vllm_ascend_models.openelm.checkpoint import check_headers
from vllm_ascend_models.openelm.config import OpenELMConfig
from vllm_ascend_models.openelm.geometry import tensor_parallel_sizes
from vllm_ascend_models.openelm.tokenizer import choose_tokenizer

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_logger = logging.getLogger("vllm.ascend_models")

_SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"


class OpenELMPolicy(VerifyAndUpdateConfig):
    """vLLM calls the first hook before a tokenizer loads, the second after."""

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        """Settle remote code, head counts and the tokenizer."""
        _never_run_remote_code(model_config)
        _warn_of_other_multipliers(model_config.hf_config)
        choose_tokenizer(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Settle tensor parallelism, the weight format and what a platform needs."""
        config: OpenELMConfig = vllm_config.model_config.hf_config
        _check_tensor_parallel(config, vllm_config.parallel_config.tensor_parallel_size)
        _take_safetensors_only(vllm_config)
        _keep_kv_whole_if_ratio_changes(config)
        _capture_in_pieces_on_npus(vllm_config, config)


def _never_run_remote_code(model_config: "ModelConfig") -> None:
    if model_config.trust_remote_code:
        model_config.trust_remote_code = False
        _logger.info("OpenELM runs no code of the checkpoint: --trust-remote-code off.")


def _warn_of_other_multipliers(config: OpenELMConfig) -> None:
    if (derived := config.derive_num_query_heads()) != config.num_query_heads:
        _logger.warning(
            "config.json: `qkv_multipliers` would give the query heads %s, but "
            "`num_query_heads` says %s. The lists are used; the tensors must fit them.",
            derived,
            config.num_query_heads,
        )


def _check_tensor_parallel(config: OpenELMConfig, tp_size: int) -> None:
    sizes = tensor_parallel_sizes(config.layer_geometry())
    if tp_size not in sizes:
        raise ValueError(
            f"--tensor-parallel-size {tp_size} cannot split this OpenELM: its layers "
            f"have {sorted(set(config.num_kv_heads))} KV heads. Sizes that work: "
            f"{', '.join(map(str, sizes))}. For more devices use "
            "--pipeline-parallel-size or --data-parallel-size."
        )


def _take_safetensors_only(vllm_config: "VllmConfig") -> None:
    load_config, model_config = vllm_config.load_config, vllm_config.model_config
    if load_config.load_format in ("pt", "npcache"):
        raise ValueError(
            f"--load-format {load_config.load_format} reads pickled weights, which "
            "can run code. OpenELM takes safetensors only."
        )
    if load_config.load_format not in ("auto", "hf", "safetensors"):
        return
    # The other two fall back to pickled *.bin files where there is no safetensors.
    load_config.load_format = "safetensors"
    directory = Path(model_config.model)
    if directory.is_dir() and model_config.quantization is None:
        check_headers(directory, model_config.hf_config)


def _keep_kv_whole_if_ratio_changes(config: OpenELMConfig) -> None:
    heads = zip(config.num_query_heads, config.num_kv_heads, strict=True)
    ratio_changes = len({q // kv for q, kv in heads}) > 1
    if not ratio_changes or not _compat.cpu_attention_misreads_changing_ratio():
        return
    if os.environ.setdefault(_SPLIT_KV, "0") != "0":
        raise ValueError(
            f"{_SPLIT_KV}={os.environ[_SPLIT_KV]}: on this vLLM the CPU attention "
            "gives wrong results with a split KV cache where layers differ in query "
            "heads per KV head, as this checkpoint's do. Unset it."
        )
    _logger.info(
        "%s=0: this vLLM's CPU attention is wrong with a split KV cache where layers "
        "differ in query heads per KV head, as this checkpoint's do.",
        _SPLIT_KV,
    )


def _capture_in_pieces_on_npus(
    vllm_config: "VllmConfig", config: OpenELMConfig
) -> None:
    """Keep attention out of ACL graphs, unless the user chose a graph mode.

    In a full graph vllm-ascend gives every layer the attention workspace that the
    first one asked for (attention/attention_v1.py), which is too small for layers
    with more heads: a device would write beyond it.
    """
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    heads = set(zip(config.num_query_heads, config.num_kv_heads, strict=True))
    if (
        len(heads) == 1
        or current_platform.device_type != "npu"
        or vllm_config.model_config.enforce_eager
        or compilation.cudagraph_mode is not None
    ):
        return
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    _logger.info(
        "Graphs are PIECEWISE: full ones size the attention workspace of an NPU by the "
        "first layer, and this checkpoint's layers differ. Your own `cudagraph_mode` "
        "in --compilation-config wins."
    )
