"""The part of a vocabulary that one tensor-parallel rank holds."""

import torch

from ascend.emulator.operators import operator


@operator(
    "_C_ascend::get_masked_input_and_mask",
    schema="(Tensor input, int org_vocab_start_index, int org_vocab_end_index, "
    "int num_org_vocab_padding, int added_vocab_start_index, "
    "int added_vocab_end_index) -> (Tensor masked_input, Tensor mask)",
)
def get_masked_input_and_mask(
    input: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids as rows of this rank's embedding; 0 and masked where it has none.

    Source: the function of this name in vLLM's layers/vocab_parallel_embedding.py.
    """
    is_original = (input >= org_vocab_start_index) & (input < org_vocab_end_index)
    is_added = (input >= added_vocab_start_index) & (input < added_vocab_end_index)
    rows_before_added = (
        org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    )
    offset = org_vocab_start_index * is_original
    offset += (added_vocab_start_index - rows_before_added) * is_added
    is_here = is_original | is_added
    return is_here * (input - offset), ~is_here
