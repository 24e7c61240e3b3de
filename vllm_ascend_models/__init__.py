"""OpenELM and Llama 3.1 for vLLM, on Huawei Ascend NPUs and everywhere else.

vLLM calls `register` by itself through the ``vllm.general_plugins`` entry point,
in every process that it starts. This module loads the standard library only, so
that a process pays for the package no more than it uses of it.
"""

import logging

__version__ = "0.1.0"

__all__ = ["__version__", "register"]

_registered = False


def register() -> None:
    """Register this package's models with the vLLM that is running.

    Idempotent, touches no device, and never raises: what cannot be registered
    is logged once, and every other model of that vLLM still serves.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        from vllm_ascend_models import _compat

        if _compat.engine_is_supported(__version__):
            from vllm_ascend_models.openelm import registration
            from vllm_ascend_models.ops import npu

            registration.register()
            npu.register()
    except Exception as error:
        # vLLM does not catch what a plugin raises: one bad plugin would take
        # down the engine of a user who may not even serve our models. The logger
        # is a child of vLLM's, because vLLM configures no other one.
        logging.getLogger("vllm.ascend_models").error(
            "vllm-ascend-models %s could not register its models (%s: %s). "
            "Other models are not affected.",
            __version__,
            type(error).__name__,
            error,
        )
