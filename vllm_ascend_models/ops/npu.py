"""What this layer adds to vLLM where vllm-ascend is the platform, and nowhere else."""

import inspect
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

ROTARY_EMBEDDING = "vllm.model_executor.layers.rotary_embedding"


def register() -> None:
    """Register our NPU layers as soon as vLLM's own are there.

    Those take a tenth of a second to import, and most processes that call plugins
    never need them: so we wait until somebody does.
    """
    # Asking vLLM for its platform could load one; a process that runs on NPUs has
    # loaded vllm-ascend before it calls plugins.
    if "vllm_ascend" not in sys.modules:
        return
    if ROTARY_EMBEDDING in sys.modules:
        _register_layers()
    else:
        sys.meta_path.insert(0, _AfterRotaryEmbedding())


def _register_layers() -> None:
    from vllm_ascend import utils

    from vllm_ascend_models.ops import rope

    # vllm-ascend registers its layers later, and fails on a name that is taken.
    if rope.NAME not in inspect.getsource(utils):
        rope.register()


class _AfterRotaryEmbedding(MetaPathFinder):
    """Lets the other finders import the one module, and registers after it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != ROTARY_EMBEDDING:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            try:
                _register_layers()
            except Exception as error:
                logging.getLogger("vllm.ascend_models").error(
                    "vllm-ascend-models could not register its NPU layers (%s: %s). "
                    "vllm-ascend's own are used.",
                    type(error).__name__,
                    error,
                )

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
