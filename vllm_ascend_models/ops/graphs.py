"""ACL graphs of models whose layers differ in heads.

A full graph of vllm-ascend keeps one attention workspace for all layers. It takes the
first layer's, unless `needs_layer_aware_fia_graph_replay` (from vllm-ascend 0.23 on)
says that layers differ: then the largest. That function knows one model family by name
and has no other way to be told.
"""

from importlib import import_module
from types import ModuleType

_ASKED = "needs_layer_aware_fia_graph_replay"


def full_graphs_can_hold_layers_that_differ() -> bool:
    """Whether the vllm-ascend that is installed can size workspaces by all layers."""
    return hasattr(_attention(), _ASKED)


def size_workspaces_by_all_layers() -> None:
    """Tell this process's vllm-ascend that the layers of its model differ.

    Before the first attention layer is built, which asks once.
    """
    if full_graphs_can_hold_layers_that_differ():
        setattr(_attention(), _ASKED, lambda: True)


def _attention() -> ModuleType:
    return import_module("vllm_ascend.attention.attention_v1")
