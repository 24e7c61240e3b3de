"""Engines of vllm-ascend in bf16, and the bound by which they are judged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.engine import Completion, Round, RoundResult, run_engine
from support.llama import add_lora
from support.reference import Config, Tensors, reference_logits

# Logits [T, vocab] of a sequence of token ids, computed in the dtype given.
Reference = Callable[[list[int], torch.dtype], torch.Tensor]

# An implementation that rounds to bf16 at other places than the plain one is at most
# about as far from the exact value as that one is, so their distances from it are
# compared: 3 times as far is not rounding.
ROUNDING_FACTOR = 3.0


def run_on_npu(
    checkpoint: Path, rounds: list[Round], **engine_args: Any
) -> list[RoundResult]:
    """`run_engine` in bf16 with little KV cache, which an NPU has to be told."""
    defaults = {"max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}
    return run_engine(
        checkpoint, rounds, dtype="bfloat16", **{**defaults, **engine_args}
    )


def openelm_reference(config: Config, tensors: Tensors) -> Reference:
    """The plain OpenELM, with the weights of a bf16 checkpoint."""

    def logits(token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
        cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        return reference_logits(config, cast, token_ids).float()

    return logits


@torch.inference_mode()
def assert_bf16_close(
    reference: Reference, prompts: list[list[int]], completions: list[Completion]
) -> None:
    """Fail unless every logit is as near to the fp32 reference as bf16 can be.

    The bound is `ROUNDING_FACTOR` times the worst error of the plain reference itself
    in bf16, on the same tokens. A greedy token must be one that the fp32 reference
    puts within that bound of its best.
    """
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = prompt + completion.token_ids[:-1]
        exact = reference(tokens, torch.float32).numpy()
        rounded = reference(tokens, torch.bfloat16).numpy()
        bound = ROUNDING_FACTOR * np.abs(rounded - exact).max()
        what = f"prompt of {len(prompt)} tokens, bound {bound:.3g}"
        generated = exact[len(prompt) - 1 :]
        _assert_within(completion.logits, generated, bound, f"{what}, new tokens")
        if completion.prompt_logits is not None and len(prompt) > 1:
            before = exact[: len(prompt) - 1]
            _assert_within(completion.prompt_logits, before, bound, f"{what}, prompt")
        chosen = np.take_along_axis(
            generated, np.array(completion.token_ids)[:, None], axis=1
        )[:, 0]
        short = generated.max(axis=1) - chosen
        assert short.max() <= bound, f"{what}: a token {short.max():.3g} below the best"


def _assert_within(got: np.ndarray, exact: np.ndarray, bound: float, what: str) -> None:
    assert got.shape == exact.shape, f"{what}: {got.shape} instead of {exact.shape}"
    by_row = np.nan_to_num(np.abs(got - exact), nan=np.inf).max(axis=1)
    wrong = np.flatnonzero(by_row > bound)
    assert not len(wrong), (
        f"{what}: logits off by up to {by_row.max():.3g}, from row {wrong[0]} on "
        f"in {len(wrong)} of {len(by_row)} rows"
    )


def llama_reference(checkpoint: Path, adapter: Path | None = None) -> Reference:
    """transformers' own Llama; with the weights of a LoRA adapter added, if given."""
    from transformers import LlamaForCausalLM

    def logits(token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
        model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        if adapter is not None:
            add_lora(model, adapter)
        return model(torch.tensor([token_ids])).logits[0].float()

    return logits
