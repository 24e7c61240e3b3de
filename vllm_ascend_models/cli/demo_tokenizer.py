"""The demo model's tokenizer files, readable by transformers 4.57 and 5."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ascend_models.cli.demo_weights import LlamaSource


def write_tokenizer(directory: Path, source: "LlamaSource") -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included."""
    tokenizer = json.dumps(_tokenizer_json(source), ensure_ascii=False)
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config = json.dumps(_tokenizer_config(source), ensure_ascii=False, indent=2)
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")


def _tokenizer_json(source: "LlamaSource") -> dict[str, object]:
    """Byte-level BPE as SmolLM2 has it: ``tokenizer.ggml.pre`` is ``smollm``."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    special_tokens = [
        {
            "id": token_id,
            "content": source.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id in source.special_token_ids
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": source.tokens[source.unk_token_id],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(source.tokens)},
            "merges": source.merges,
        },
    }


def _tokenizer_config(source: "LlamaSource") -> dict[str, object]:
    return {
        # transformers 5 would write `TokenizersBackend` here, which 4.57 refuses.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": source.tokens[source.bos_token_id],
        "eos_token": source.tokens[source.eos_token_id],
        "unk_token": source.tokens[source.unk_token_id],
        "pad_token": source.tokens[source.pad_token_id],
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.context_length,
        "chat_template": source.chat_template,
    }
