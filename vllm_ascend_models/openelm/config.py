"""`OpenELMConfig`: Apple's configuration keys, checked, with the names vLLM reads."""

import math
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from vllm_ascend_models.openelm.geometry import (
    LayerGeometry,
    derive_ffn_intermediate_sizes,
    derive_num_query_heads,
)

# Names by which vLLM and vllm-ascend read a configuration. They are computed from
# Apple's keys, so what a saved file says of them is not read back.
_COMPUTED_KEYS = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "tie_word_embeddings",
)


class OpenELMConfig(PretrainedConfig):
    """Configuration of an OpenELM checkpoint, in the keys of Apple's config.json.

    Args:
        model_dim: width of the residual stream.
        num_transformer_layers: number of decoder layers.
        head_dim: width of one attention head; even, because RoPE turns pairs.
        num_query_heads: query heads of each layer; derived from
            ``qkv_multipliers`` when absent.
        num_kv_heads: KV heads of each layer; when absent, the query heads divided
            by ``num_gqa_groups``.
        num_gqa_groups: query heads that share one KV head, where it is derived.
        qkv_multipliers: query width over ``model_dim``: one number, the first and
            the last layer's, or one for each layer.
        ffn_multipliers: FFN width over ``model_dim``, in the same three forms.
        ffn_dim_divisor: every FFN width is a multiple of it.
        rms_norm_eps: not in Apple's file, whose code fixes it at 1e-6.
        rope_parameters: RoPE in the form of transformers 5; plain RoPE with
            ``rope_freq_constant`` when absent.

    Raises:
        ValueError: a field is missing its range or contradicts another; the
            message names the field, the value found and what is right.
    """

    model_type = "openelm"

    def __init__(
        self,
        vocab_size: int = 32000,
        max_context_length: int = 2048,
        num_transformer_layers: int = 12,
        model_dim: int = 2048,
        head_dim: int = 128,
        qkv_multipliers: float | Sequence[float] = 1.0,
        num_query_heads: Sequence[int] | None = None,
        num_kv_heads: Sequence[int] | None = None,
        num_gqa_groups: int = 1,
        ffn_multipliers: float | Sequence[float] = 4.0,
        ffn_with_glu: bool = True,
        ffn_dim_divisor: int = 256,
        activation_fn_name: str = "swish",
        normalization_layer_name: str = "rms_norm",
        normalize_qk_projections: bool = False,
        share_input_output_layers: bool = False,
        rope_freq_constant: float = 10000,
        rope_max_length: int = 4096,
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        **kwargs: Any,
    ) -> None:
        layers = _positive_int("num_transformer_layers", num_transformer_layers)
        self.vocab_size = _positive_int("vocab_size", vocab_size)
        self.max_context_length = _positive_int(
            "max_context_length", max_context_length
        )
        self.num_transformer_layers = layers
        self.model_dim = _positive_int("model_dim", model_dim)
        self.head_dim = _even_int("head_dim", head_dim)
        self.num_gqa_groups = _positive_int("num_gqa_groups", num_gqa_groups)
        self.qkv_multipliers = _multipliers("qkv_multipliers", qkv_multipliers, layers)
        self.ffn_multipliers = _multipliers("ffn_multipliers", ffn_multipliers, layers)
        self.ffn_dim_divisor = _positive_int("ffn_dim_divisor", ffn_dim_divisor)
        self.num_query_heads = (
            self.derive_num_query_heads()
            if num_query_heads is None
            else _layer_ints("num_query_heads", num_query_heads, layers)
        )
        self.num_kv_heads = (
            _divide_heads(self.num_query_heads, self.num_gqa_groups)
            if num_kv_heads is None
            else _layer_ints("num_kv_heads", num_kv_heads, layers)
        )
        _check_head_groups(self.num_query_heads, self.num_kv_heads)
        self.ffn_with_glu = _one_of("ffn_with_glu", ffn_with_glu, (True,))
        self.activation_fn_name = _one_of(
            "activation_fn_name", activation_fn_name, ("swish", "silu")
        )
        self.normalization_layer_name = _one_of(
            "normalization_layer_name", normalization_layer_name, ("rms_norm",)
        )
        self.normalize_qk_projections = _one_of(
            "normalize_qk_projections", normalize_qk_projections, (True, False)
        )
        self.share_input_output_layers = _one_of(
            "share_input_output_layers", share_input_output_layers, (True, False)
        )
        self.rope_freq_constant = _positive("rope_freq_constant", rope_freq_constant)
        self.rope_max_length = _positive_int("rope_max_length", rope_max_length)
        self.rms_norm_eps = _positive("rms_norm_eps", rms_norm_eps)
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.rope_parameters = rope_parameters or {
            "rope_type": "default",
            "rope_theta": self.rope_freq_constant,
        }

        sizes = self.layer_geometry()
        self.hidden_act = "silu"
        self.hidden_size = self.model_dim
        self.intermediate_size = max(size.intermediate_size for size in sizes)
        self.max_position_embeddings = self.max_context_length
        self.num_attention_heads = max(self.num_query_heads)
        self.num_hidden_layers = layers
        self.num_key_value_heads = max(self.num_kv_heads)
        self.tie_word_embeddings = self.share_input_output_layers
        for key in _COMPUTED_KEYS:
            kwargs.pop(key, None)
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=self.share_input_output_layers,
            **kwargs,
        )
        # transformers 5 drops these two from what it is given as arguments.
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id

    def derive_num_query_heads(self) -> list[int]:
        """Query heads of each layer as ``qkv_multipliers`` alone would have them."""
        return derive_num_query_heads(
            self.qkv_multipliers,
            model_dim=self.model_dim,
            head_dim=self.head_dim,
            num_gqa_groups=self.num_gqa_groups,
            num_layers=self.num_transformer_layers,
        )

    def layer_geometry(self) -> list[LayerGeometry]:
        """Sizes of each layer, first to last."""
        widths = derive_ffn_intermediate_sizes(
            self.ffn_multipliers,
            model_dim=self.model_dim,
            ffn_dim_divisor=self.ffn_dim_divisor,
            num_layers=self.num_transformer_layers,
        )
        heads = zip(self.num_query_heads, self.num_kv_heads, strict=True)
        return [
            LayerGeometry(q, kv, self.head_dim, width)
            for (q, kv), width in zip(heads, widths, strict=True)
        ]


def _error(field: str, value: object, wanted: str) -> ValueError:
    return ValueError(
        f"OpenELM config.json: `{field}` is {value!r}, but must be {wanted}."
    )


def _is_number(value: object) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value)  # type: ignore[arg-type]


def _positive(field: str, value: Any) -> float:
    if not _is_number(value) or value <= 0:
        raise _error(field, value, "a positive, finite number")
    return value


def _positive_int(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _error(field, value, "a positive integer")
    return value


def _even_int(field: str, value: Any) -> int:
    if _positive_int(field, value) % 2:
        raise _error(field, value, "even, because RoPE rotates pairs of channels")
    return value


def _one_of(field: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not any(value is x or (isinstance(x, str) and value == x) for x in allowed):
        names = " or ".join(repr(x) for x in allowed)
        raise _error(field, value, f"{names}: nothing else is implemented")
    return value


def _multipliers(field: str, value: Any, layers: int) -> list[float]:
    values = [value, value] if _is_number(value) else value
    if not isinstance(values, (list, tuple)) or len(values) not in (2, layers):
        wanted = f"one number, two, or one for each of the {layers} layers"
        raise _error(field, value, wanted)
    return [_positive(f"{field}[{i}]", x) for i, x in enumerate(values)]


def _layer_ints(field: str, value: Any, layers: int) -> list[int]:
    if not isinstance(value, (list, tuple)) or len(value) != layers:
        wanted = f"a list of {layers} integers, one for each layer"
        raise _error(field, value, wanted)
    return [_positive_int(f"{field}[{i}]", x) for i, x in enumerate(value)]


def _divide_heads(num_query_heads: list[int], num_gqa_groups: int) -> list[int]:
    for layer, q in enumerate(num_query_heads):
        if q % num_gqa_groups:
            wanted = f"a multiple of `num_gqa_groups` ({num_gqa_groups})"
            raise _error(f"num_query_heads[{layer}]", q, wanted)
    return [q // num_gqa_groups for q in num_query_heads]


def _check_head_groups(num_query_heads: list[int], num_kv_heads: list[int]) -> None:
    pairs = zip(num_query_heads, num_kv_heads, strict=True)
    for layer, (q, kv) in enumerate(pairs):
        if q % kv:
            wanted = f"a multiple of num_kv_heads[{layer}] ({kv})"
            raise _error(f"num_query_heads[{layer}]", q, wanted)
