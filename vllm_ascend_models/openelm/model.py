"""Inference-only OpenELM, compatible with Apple's checkpoints.

The modules carry the names of Apple's tensors, whose q | k | v and gate | up are
already fused, so that weights load without renaming or stacking. Every layer has
its own number of heads and FFN width. Source: corenet's ``general_gpt.py``.
"""

from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import SupportsPP, SupportsQuant
from vllm.model_executor.models.utils import (
    PPMissingLayer,
    extract_layer_index,
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from vllm_ascend_models.openelm.checkpoint import check_weights
from vllm_ascend_models.openelm.config import OpenELMConfig
from vllm_ascend_models.openelm.geometry import LayerGeometry
from vllm_ascend_models.ops import graphs
from vllm_ascend_models.ops.gqa import plan_heads

Layout = Callable[[torch.Tensor], torch.Tensor]


class OpenELMFeedForward(nn.Module):
    """``proj_2(silu(gate) * up)`` with gate and up fused in ``proj_1``."""

    def __init__(
        self,
        config: OpenELMConfig,
        geometry: LayerGeometry,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.proj_1 = MergedColumnParallelLinear(
            input_size=config.model_dim,
            output_sizes=[geometry.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.proj_1",
        )
        self.act_fn = SiluAndMul()
        self.proj_2 = RowParallelLinear(
            input_size=geometry.intermediate_size,
            output_size=config.model_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.proj_2",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens, model_dim]`` to the same shape."""
        gate_up, _ = self.proj_1(hidden_states)
        hidden_states, _ = self.proj_2(self.act_fn(gate_up))
        return hidden_states


class OpenELMAttention(nn.Module):
    """Grouped-query attention with this layer's own heads, q/k norm before RoPE."""

    def __init__(
        self,
        config: OpenELMConfig,
        geometry: LayerGeometry,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.plan = plan_heads(
            geometry.num_query_heads,
            geometry.num_kv_heads,
            get_tensor_model_parallel_world_size(),
        )
        self.head_dim = geometry.head_dim
        self.num_heads = self.plan.num_heads
        self.num_kv_heads = self.plan.num_kv_heads
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim

        self.qkv_proj = QKVParallelLinear(
            hidden_size=config.model_dim,
            head_size=self.head_dim,
            total_num_heads=len(self.plan.query_slots),
            total_num_kv_heads=len(self.plan.kv_slots),
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.out_proj = RowParallelLinear(
            input_size=len(self.plan.query_slots) * self.head_dim,
            output_size=config.model_dim,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
        )
        self.normalize_qk = config.normalize_qk_projections
        if self.normalize_qk:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=max(config.rope_max_length, config.max_position_embeddings),
            is_neox_style=True,
            rope_parameters=config.rope_parameters,
        )
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Attend over the KV cache.

        Args:
            positions: ``[num_tokens]``.
            hidden_states: ``[num_tokens, model_dim]``.

        Returns:
            ``[num_tokens, model_dim]``.
        """
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.normalize_qk:
            # In these very views: vllm-ascend's QK-norm + RoPE fusion matches them.
            q_by_head = q.view(*q.shape[:-1], self.num_heads, self.head_dim)
            q = self.q_norm(q_by_head).view(q.shape)
            k_by_head = k.view(*k.shape[:-1], self.num_kv_heads, self.head_dim)
            k = self.k_norm(k_by_head).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.out_proj(self.attn(q, k, v))
        return output


class OpenELMDecoderLayer(nn.Module):
    """Pre-norm layer, with the residual carried beside the hidden states.

    So that each addition fuses with the norm after it.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: OpenELMConfig = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        geometry = config.layer_geometry()[extract_layer_index(prefix)]
        self.attn = OpenELMAttention(
            config,
            geometry,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )
        self.ffn = OpenELMFeedForward(
            config, geometry, quant_config=quant_config, prefix=f"{prefix}.ffn"
        )
        self.attn_norm = RMSNorm(config.model_dim, eps=config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.model_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and residual, each ``[num_tokens, model_dim]``."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.attn_norm(hidden_states)
        else:
            hidden_states, residual = self.attn_norm(hidden_states, residual)
        hidden_states = self.attn(positions, hidden_states)
        hidden_states, residual = self.ffn_norm(hidden_states, residual)
        return self.ffn(hidden_states), residual


@support_torch_compile
class OpenELMModel(nn.Module):
    """Embedding, decoder layers of this pipeline stage, final norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: OpenELMConfig = vllm_config.model_config.hf_config
        pp_group = get_pp_group()
        if pp_group.is_first_rank or (
            config.tie_word_embeddings and pp_group.is_last_rank
        ):
            self.token_embeddings = VocabParallelEmbedding(
                config.vocab_size,
                config.model_dim,
                quant_config=vllm_config.quant_config,
                prefix=f"{prefix}.token_embeddings",
            )
        else:
            self.token_embeddings = PPMissingLayer()
        if current_platform.device_type == "npu":
            graphs.size_workspaces_by_all_layers()
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_transformer_layers,
            lambda prefix: OpenELMDecoderLayer(vllm_config, prefix=prefix),
            prefix=f"{prefix}.layers",
        )
        if pp_group.is_last_rank:
            self.norm = RMSNorm(config.model_dim, eps=config.rms_norm_eps)
        else:
            self.norm = PPMissingLayer()
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.model_dim
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up ``[num_tokens]`` token ids: ``[num_tokens, model_dim]``."""
        return self.token_embeddings(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this stage: ``[num_tokens, model_dim]``, or what the next one needs."""
        if get_pp_group().is_first_rank:
            hidden_states = (
                self.embed_input_ids(input_ids)
                if inputs_embeds is None
                else inputs_embeds
            )
            residual = None
        else:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors(
                {"hidden_states": hidden_states, "residual": residual}
            )
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class OpenELMForCausalLM(nn.Module, SupportsPP, SupportsQuant):
    """OpenELM with its language-model head, tied to the embedding or its own."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config: OpenELMConfig = vllm_config.model_config.hf_config
        self.quant_config = vllm_config.quant_config
        self.transformer = OpenELMModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "transformer")
        )
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                self.config.vocab_size,
                self.config.model_dim,
                quant_config=self.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            if self.config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(
                    self.transformer.token_embeddings
                )
            self.logits_processor = LogitsProcessor(self.config.vocab_size)
        else:
            self.lm_head = PPMissingLayer()
        self.make_empty_intermediate_tensors = (
            self.transformer.make_empty_intermediate_tensors
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up ``[num_tokens]`` token ids: ``[num_tokens, model_dim]``."""
        return self.transformer.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Run this pipeline stage over ``[num_tokens]`` ids and positions."""
        return self.transformer(
            input_ids, positions, intermediate_tensors, inputs_embeds
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """``[num_tokens, model_dim]`` to ``[num_tokens, vocab_size]``."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load every tensor of the checkpoint, or stop with the one that is wrong.

        Raises:
            ValueError: a tensor is missing, unknown, of another shape than the
                configuration gives it, or holds NaN or infinity.
        """
        if self.quant_config is None:
            weights = check_weights(weights, self.config)
        # Tensors have the names of our parameters: vLLM's AutoWeightsLoader, which
        # walks the modules for each, would add a tenth to the time of loading.
        parameters = dict(self.named_parameters())
        layouts = self._head_layouts()
        loaded: set[str] = set()
        for name, tensor in weights:
            if is_pp_missing_parameter(name, self):
                continue
            if name not in parameters:
                raise ValueError(f"The model has no parameter for tensor `{name}`.")
            parameter = parameters[name]
            if name in layouts:
                tensor = layouts[name](tensor)
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor)
            loaded.add(name)
        return loaded

    def _head_layouts(self) -> dict[str, Layout]:
        """How to lay out the tensors of layers whose heads do not divide."""
        layouts: dict[str, Layout] = {}
        for name, module in self.named_modules():
            if isinstance(module, OpenELMAttention) and not module.plan.is_identity:
                layouts[f"{name}.qkv_proj.weight"] = module.plan.lay_out_qkv
                layouts[f"{name}.out_proj.weight"] = module.plan.lay_out_output
        return layouts
