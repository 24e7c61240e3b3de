"""Every difference between the vLLM versions that we support, and the range itself.

Imports nothing of ours, and nothing at import but the standard library.
"""

import logging
import multiprocessing
import re

OLDEST_ENGINE = (0, 18)
NEWEST_ENGINE = (0, 32)

_logger = logging.getLogger("vllm.ascend_models")


def engine_is_supported(package_version: str) -> bool:
    """Whether to register with the vLLM that is installed; one line if in doubt.

    Below the range we stand down: the extension points are not there. Above it we
    go on, because they most likely still are, and say that nobody has tried.
    """
    import vllm

    version = _release(vllm.__version__)
    supported_range = "vLLM {}.{} to {}.{}".format(*OLDEST_ENGINE, *NEWEST_ENGINE)
    if version and version < OLDEST_ENGINE:
        _warn_once(
            "vllm-ascend-models %s needs %s and stands down on %s: its models are "
            "not registered, others are not affected. Upgrade vLLM to use it.",
            package_version,
            supported_range,
            vllm.__version__,
        )
        return False
    if not version or version > NEWEST_ENGINE:
        _warn_once(
            "vllm-ascend-models %s is tested on %s; vLLM %s is outside that range.",
            package_version,
            supported_range,
            vllm.__version__,
        )
    return True


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor of a vLLM version; None for a build without one ("dev")."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _warn_once(message: str, *args: object) -> None:
    # Plugins load in every process. Workers and engine cores are children of the
    # process that the user started, which has already said it.
    if multiprocessing.parent_process() is None:
        _logger.warning(message, *args)


def cpu_attention_misreads_changing_ratio() -> bool:
    """Whether this engine's CPU attention is wrong if q / kv differs by layer.

    Where it splits the KV cache over threads, vLLM 0.23 sizes the split by the
    model-wide query heads, which fits every layer only if their ratio to the KV
    heads is the same. Later versions read the heads from the layers
    (``get_num_attention_heads_from_layers``), earlier ones do not split.
    """
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import utils

    return (
        current_platform.is_cpu()
        and hasattr(envs, "VLLM_CPU_ATTN_SPLIT_KV")
        and not hasattr(utils, "get_num_attention_heads_from_layers")
    )
