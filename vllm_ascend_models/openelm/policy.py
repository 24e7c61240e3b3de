"""What OpenELM sets and refuses in a vLLM configuration, before weights load.

Changes only what was left at its default, one log line each; what cannot work is
an error here, in the process that the user started.
"""

import copy
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from vllm_ascend_models import _compat
from vllm_ascend_models.openelm.arch_convertor import OpenELMModelArchConfigConvertor
from vllm_ascend_models.openelm.checkpoint import check_headers
from vllm_ascend_models.openelm.config import OpenELMConfig
from vllm_ascend_models.openelm.geometry import tensor_parallel_sizes
from vllm_ascend_models.openelm.tokenizer import choose_tokenizer
from vllm_ascend_models.ops import graphs
from vllm_ascend_models.ops.gqa import HeadPlan, plan_heads

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
        model_config = vllm_config.model_config
        config: OpenELMConfig = model_config.hf_config
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        _check_tensor_parallel(config, tp_size)
        plans = [
            plan_heads(layer.num_query_heads, layer.num_kv_heads, tp_size)
            for layer in config.layer_geometry()
        ]
        _plan_tensor_parallel(model_config, plans)
        _take_safetensors_only(vllm_config)
        _keep_kv_whole_if_ratio_changes(plans)
        _capture_in_pieces_on_npus(vllm_config, plans)


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
            f"--tensor-parallel-size {tp_size} cannot split this OpenELM. Sizes that "
            f"work: {', '.join(map(str, sizes))}. They divide the width of every "
            f"layer's FFN, and are at most {min(config.num_query_heads)}, the query "
            "heads of the narrowest layer. For more devices use "
            "--pipeline-parallel-size or --data-parallel-size."
        )


def _plan_tensor_parallel(model_config: "ModelConfig", plans: list[HeadPlan]) -> None:
    """Tell vLLM of the heads that all ranks have together, empty slots included."""
    if all(plan.is_identity for plan in plans):
        return
    if model_config.quantization is not None:
        raise ValueError(
            "--tensor-parallel-size: heads of this OpenELM do not divide, and laying "
            "them out unevenly is not implemented for quantised weights "
            f"({model_config.quantization}). Use --pipeline-parallel-size."
        )
    config = copy.copy(model_config.hf_config)
    config.num_query_heads = [len(plan.query_slots) for plan in plans]
    config.num_kv_heads = [len(plan.kv_slots) for plan in plans]
    convertor = OpenELMModelArchConfigConvertor(config, config)
    model_config.model_arch_config = convertor.convert()


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


def _keep_kv_whole_if_ratio_changes(plans: list[HeadPlan]) -> None:
    ratio_changes = len({plan.num_heads // plan.num_kv_heads for plan in plans}) > 1
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
    vllm_config: "VllmConfig", plans: list[HeadPlan]
) -> None:
    """Keep attention out of ACL graphs, unless the user chose a graph mode.

    Full graphs give all layers one attention workspace, see `ops.graphs`: too small a
    one would be written past its end. What we do about it was not run on a device.
    """
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    heads = {(plan.num_heads, plan.num_kv_heads) for plan in plans}
    if (
        len(heads) == 1
        or current_platform.device_type != "npu"
        or vllm_config.model_config.enforce_eager
    ):
        return
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        _logger.info(
            "Graphs are PIECEWISE: this checkpoint's layers differ, and full graphs of "
            "such layers were not run on a device. Your own `cudagraph_mode` in "
            "--compilation-config wins."
        )
    elif (
        compilation.cudagraph_mode.has_full_cudagraphs()
        and not graphs.full_graphs_can_hold_layers_that_differ()
    ):
        raise ValueError(
            f"cudagraph_mode {compilation.cudagraph_mode.name}: in a full graph this "
            "vllm-ascend gives all layers the attention workspace of the first, and "
            "this checkpoint's layers differ. Use PIECEWISE, or vllm-ascend 0.23 or "
            "later."
        )
