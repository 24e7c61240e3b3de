"""Engines of vllm-ascend in bf16, and the bound by which they are judged."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support.engine import Completion, Round, RoundResult, run_engine
from support.llama import add_lora
from support.reference import Config, Tensors, reference_logits

# Logits [T, vocab] of a sequence of token ids, computed in the dtype given.
Reference = Callable[[list[int], torch.dtype], torch.Tensor]

# An implementation that rounds to bf16 at other places than the plain one is at most
# about as far from the exact value as that one is, so their distances from it are
# compared: twice as far is not rounding.
ROUNDING_FACTOR = 2.0


def needs_devices(count: int) -> None:
    """Skip the test where fewer NPUs are there; the emulator has as many as wanted."""
    found = len(list(Path("/dev").glob("davinci[0-9]*")))
    available = int(os.environ.get("NPU_EMULATOR_DEVICES", found))
    if available < count:
        pytest.skip(f"needs {count} NPUs, {available} are there")


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
    """Fail unless the logits are as near to the fp32 reference as bf16 can be.

    They may be `ROUNDING_FACTOR` times as far from it as the plain reference in bf16
    is at worst, on the same tokens: in any one logit, and in all of a position together
    (Euclidean), since an error that is everywhere is small anywhere. A greedy token
    must be one that the fp32 reference puts within that bound of its best.
    """
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = prompt + completion.token_ids[:-1]
        exact = reference(tokens, torch.float32)
        rounding = reference(tokens, torch.bfloat16) - exact
        assert len(completion.logits) == len(completion.token_ids)
        rows = [torch.from_numpy(completion.logits)]
        if completion.prompt_logits is not None and len(prompt) > 1:
            assert len(completion.prompt_logits) == len(prompt) - 1
            rows.insert(0, torch.from_numpy(completion.prompt_logits))
        error = torch.cat(rows) - exact[-sum(map(len, rows)) :]
        for order in (math.inf, 2):
            _assert_within(
                error.norm(order, dim=-1),
                rounding.norm(order, dim=-1).max(),
                f"prompt of {len(prompt)} tokens, L{order} norm",
            )
        generated = exact[len(prompt) - 1 :]
        _assert_near_best(generated, completion.token_ids, rounding)


class Answer(NamedTuple):
    """What a server answered: tokens, and the logprobs of the best at each."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]


@torch.inference_mode()
def assert_answer_bf16_close(
    reference: Reference, prompt: list[int], answer: Answer
) -> None:
    """As `assert_bf16_close`, on what a server tells: logprobs of the best tokens."""
    tokens = prompt + answer.token_ids[:-1]
    exact, rounded = (
        reference(tokens, dtype)[len(prompt) - 1 :].log_softmax(-1)
        for dtype in (torch.float32, torch.bfloat16)
    )
    best = torch.tensor([list(row) for row in answer.logprobs])
    told = torch.tensor([list(row.values()) for row in answer.logprobs])
    expected = exact.gather(1, best)
    rounding = rounded.gather(1, best) - expected
    _assert_within((told - expected).norm(), rounding.norm(), "logprobs")
    _assert_near_best(exact, answer.token_ids, rounded - exact)


def _assert_within(error: torch.Tensor, rounding: torch.Tensor, what: str) -> None:
    factor = (error.nan_to_num(nan=math.inf) / rounding).max()
    assert factor <= ROUNDING_FACTOR, (
        f"{what}: {factor:.3g} times as far from fp32 as rounding to bf16 goes, "
        f"{ROUNDING_FACTOR:g} times allowed"
    )


def _assert_near_best(
    exact: torch.Tensor, token_ids: list[int], rounding: torch.Tensor
) -> None:
    chosen = exact.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    short = (exact.amax(-1) - chosen).max()
    bound = ROUNDING_FACTOR * rounding.abs().max()
    assert short <= bound, f"a token {short:.3g} below the best, {bound:.3g} allowed"


def llama_reference(checkpoint: Path, adapter: Path | None = None) -> Reference:
    """transformers' own Llama; with the weights of a LoRA adapter added, if given."""
    from transformers import LlamaForCausalLM

    def logits(token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
        model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        if adapter is not None:
            add_lora(model, adapter)
        return model(torch.tensor([token_ids])).logits[0].float()

    return logits
