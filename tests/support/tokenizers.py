"""A small tokenizer of Llama's kind, made on the spot: bytes and ASCII words."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

SPECIAL = ["<unk>", "<s>", "</s>"]


def write_llama_tokenizer(
    directory: Path,
    *,
    vocab_size: int = 512,
    add_bos: bool = True,
    chat_template: str | None = None,
    pieces_at: dict[str, int] | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json: BOS 1, EOS 2, byte fallback.

    ``pieces_at`` puts pieces at token ids of one's choice.
    """
    pieces = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *string.ascii_letters, *string.digits, *string.punctuation]
    pieces += [f"<filler{i}>" for i in range(vocab_size - len(pieces))]
    for piece, token_id in (pieces_at or {}).items():
        pieces[token_id] = piece
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(piece) for piece in SPECIAL])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
