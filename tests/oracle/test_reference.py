"""Our reference against other people's OpenELM: unchecked, it would prove little.

Staged, so that a failure points at the part that is wrong.
"""

import pytest
import torch

from support.checkpoints import TINY, TINY_PLAIN_QK_UNTIED, random_prompt
from support.compare import assert_close
from support.reference import LayerStages, Tensors, layer_stages, reference_logits

LENGTHS = [1, 17, 129, 1025]


@pytest.fixture(scope="module", params=LENGTHS)
def prompt(request: pytest.FixtureRequest) -> list[int]:
    return random_prompt(TINY, request.param)


@pytest.fixture(scope="module")
def stages(prompt: list[int], tiny_tensors: Tensors) -> list[LayerStages]:
    return layer_stages(TINY, tiny_tensors, prompt)


@torch.inference_mode()
def test_ffn_is_that_of_other_implementations(oracle, stages):
    for i, stage in enumerate(stages):
        assert_close(oracle.ffn(i, stage.ffn_in), stage.ffn_out, f"FFN of layer {i}")


@torch.inference_mode()
def test_attention_is_that_of_other_implementations(oracle, stages):
    for i, stage in enumerate(stages):
        got = oracle.attention(i, stage.attn_in)
        assert_close(got, stage.attn_out, f"attention of layer {i}")


@torch.inference_mode()
def test_layer_is_that_of_other_implementations(oracle, stages):
    for i, stage in enumerate(stages):
        assert_close(oracle.layer(i, stage.layer_in), stage.layer_out, f"layer {i}")


@torch.inference_mode()
def test_logits_are_those_of_other_implementations(oracle, prompt, tiny_tensors):
    expected = reference_logits(TINY, tiny_tensors, prompt)
    assert_close(oracle.logits(prompt), expected, "logits of the model")


@torch.inference_mode()
def test_logits_without_qk_norm_and_with_a_head_of_its_own(
    plain_untied_oracle, prompt, plain_untied_tensors
):
    got = plain_untied_oracle.logits(prompt)
    expected = reference_logits(TINY_PLAIN_QK_UNTIED, plain_untied_tensors, prompt)
    assert_close(got, expected, "logits of the model")
