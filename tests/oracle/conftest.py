"""Two implementations of OpenELM by other people, under one face."""

import importlib
import importlib.metadata
from types import ModuleType
from typing import Protocol

import numpy as np
import pytest
import torch

from support.checkpoints import TINY, TINY_PLAIN_QK_UNTIED, random_tensors
from support.reference import Config, Tensors

# The engine whose environment has the oracles. They judge our reference, which is the
# same on every engine, so that judging it once is enough.
_ENGINE_WITH_ORACLES = "0.32"


class Oracle(Protocol):
    """Another implementation, asked for one part or for the whole."""

    def ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor: ...
    def attention(self, layer: int, x: torch.Tensor) -> torch.Tensor: ...
    def layer(self, layer: int, x: torch.Tensor) -> torch.Tensor: ...
    def logits(self, token_ids: list[int]) -> torch.Tensor: ...


def _import_oracle(distribution: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        engine = _engine_version()
        if engine is None or engine.startswith(_ENGINE_WITH_ORACLES):
            pytest.fail(f"{distribution} is not installed here, and must be: {error}")
        pytest.skip(
            f"{distribution} is installed beside vLLM {_ENGINE_WITH_ORACLES} only, "
            f"where this same comparison runs; here is vLLM {engine}"
        )


def _engine_version() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


class MlxOracle:
    """mlx-lm's ``mlx_lm/models/openelm.py`` on the CPU."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        openelm = _import_oracle("mlx-lm", "mlx_lm.models.openelm")
        self.mx = _import_oracle("mlx", "mlx.core")
        self.model = openelm.Model(openelm.ModelArgs.from_dict(config))
        weights = [(name, self._to_mlx(tensor)) for name, tensor in tensors.items()]
        self.model.load_weights(weights, strict=True)
        self.layers = self.model.transformer.layers

    def ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._to_torch(self.layers[layer].ffn(self._to_mlx(x[None])))

    def attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        mask = "causal" if len(x) > 1 else None
        return self._to_torch(self.layers[layer].attn(self._to_mlx(x[None]), mask))

    def layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        mask = "causal" if len(x) > 1 else None
        return self._to_torch(self.layers[layer](self._to_mlx(x[None]), mask))

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        return self._to_torch(self.model(self.mx.array([token_ids])))

    def _to_mlx(self, tensor: torch.Tensor):
        return self.mx.array(tensor.numpy())

    def _to_torch(self, array) -> torch.Tensor:
        return torch.from_numpy(np.array(array[0]))


class OpenELMPytorchOracle:
    """The package openelm-pytorch: q/k norm and a tied head only."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        package_config = _import_oracle("openelm-pytorch", "openelm_pytorch.config")
        openelm = _import_oracle("openelm-pytorch", "openelm_pytorch.openelm")
        model_config = package_config.ModelConfig(
            vocab_size=config["vocab_size"],
            num_transformer_layers=config["num_transformer_layers"],
            model_dim=config["model_dim"],
            head_dim=config["head_dim"],
            ffn_dim_divisor=config["ffn_dim_divisor"],
            rope_freq_constant=config["rope_freq_constant"],
        )
        # It derives the lists from multipliers when made; ours are not of that family.
        model_config.num_query_heads = config["num_query_heads"]
        model_config.num_kv_heads = config["num_kv_heads"]
        model_config.ffn_multipliers = config["ffn_multipliers"]
        self.model = openelm.OpenELM.from_config(model_config).eval()
        self.model.load_state_dict(
            {name.removeprefix("transformer."): x for name, x in tensors.items()}
        )

    def ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self.model.layers[layer].ffn(x)

    # use_kv_cache: without it, this package applies no RoPE.
    def attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        attn = self.model.layers[layer].attn
        return attn(x[None], use_kv_cache=True, is_causal=len(x) > 1)[0][0]

    def layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        module = self.model.layers[layer]
        return module(x[None], use_kv_cache=True, is_causal=len(x) > 1)[0][0]

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([token_ids])
        return self.model(ids, use_kv_cache=True)["logits"][0]


@pytest.fixture(scope="package")
def tiny_tensors() -> Tensors:
    return random_tensors(TINY)


@pytest.fixture(scope="package", params=[MlxOracle, OpenELMPytorchOracle])
def oracle(request: pytest.FixtureRequest, tiny_tensors: Tensors) -> Oracle:
    return request.param(TINY, tiny_tensors)


@pytest.fixture(scope="package")
def plain_untied_tensors() -> Tensors:
    return random_tensors(TINY_PLAIN_QK_UNTIED, seed=1)


@pytest.fixture(scope="package")
def plain_untied_oracle(plain_untied_tensors: Tensors) -> Oracle:
    return MlxOracle(TINY_PLAIN_QK_UNTIED, plain_untied_tensors)
