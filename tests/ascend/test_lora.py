"""LoRA over HTTP: a Llama and an adapter of it, on one server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascend.test_server import FLAGS, PROMPTS, complete
from support.ascend import assert_answer_bf16_close, llama_reference
from support.llama import write_llama_checkpoint, write_lora
from support.server import Server, serve
from support.tokenizers import write_llama_tokenizer


@pytest.fixture(scope="module")
def llama_with_lora(tmp_path_factory) -> Iterator[tuple[Server, Path, Path]]:
    root = tmp_path_factory.mktemp("lora")
    write_llama_checkpoint(root / "llama")
    write_llama_tokenizer(root / "llama")
    write_lora(root / "adapter", root / "llama")
    adapter = ["--enable-lora", "--lora-modules", f"tuned={root / 'adapter'}"]
    with serve(root / "llama", *FLAGS, *adapter) as running:
        yield running, root / "llama", root / "adapter"


def test_a_lora_adapter_and_its_base_answer_beside_each_other(llama_with_lora):
    running, llama, adapter = llama_with_lora
    base, tuned = llama_reference(llama), llama_reference(llama, adapter)
    with ThreadPoolExecutor(4) as threads:
        models = [None, "tuned"] * 2
        prompts = [PROMPTS[1], PROMPTS[1], PROMPTS[2], PROMPTS[2]]
        answers = list(threads.map(complete, [running] * 4, prompts, models))
    for prompt, model, answer in zip(prompts, models, answers, strict=True):
        assert_answer_bf16_close(tuned if model else base, prompt, answer)
    assert answers[0] != answers[1]
