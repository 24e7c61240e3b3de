"""Plain `vllm serve` on emulated NPUs: over HTTP, on one device and on two."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from support.ascend import (
    Answer,
    Reference,
    assert_answer_bf16_close,
    needs_devices,
    openelm_reference,
)
from support.checkpoints import (
    openelm_config,
    random_prompt,
    write_openelm_checkpoint,
)
from support.server import Server, serve
from support.tokenizers import write_llama_tokenizer

# Layers that differ, with heads that two devices cannot share evenly.
OPENELM = openelm_config(
    model_dim=256,
    head_dim=64,
    num_query_heads=[6, 8, 10],
    num_kv_heads=[3, 4, 5],
    ffn_multipliers=[0.5, 2.97, 4.0],
)
PROMPTS = [random_prompt(OPENELM, length) for length in (3, 40, 129, 300)]
FLAGS = ["--enforce-eager", "--max-model-len", "1024"]
FLAGS += ["--kv-cache-memory-bytes", str(64 << 20), "--max-num-batched-tokens", "512"]
PARALLEL = {
    "one device": [],
    "tensor parallel": ["--tensor-parallel-size", "2"],
    "pipeline parallel": ["--pipeline-parallel-size", "2"],
}


@pytest.fixture(scope="module", params=PARALLEL.values(), ids=PARALLEL)
def server(request, tmp_path_factory) -> Iterator[tuple[Server, Reference]]:
    needs_devices(2 if request.param else 1)
    path = tmp_path_factory.mktemp("served")
    tensors = write_openelm_checkpoint(path, OPENELM, dtype=torch.bfloat16)
    write_llama_tokenizer(path)
    with serve(path, *FLAGS, *request.param) as running:
        yield running, openelm_reference(OPENELM, tensors)


def complete(server: Server, prompt: list[int], model: str | None = None) -> Answer:
    completion = server.client.completions.create(
        model=model or server.model,
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        logprobs=20,
        extra_body={
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    )
    choice = completion.choices[0]
    return Answer(
        choice.token_ids,
        [
            {int(token.removeprefix("token_id:")): logprob for token, logprob in top}
            for top in map(dict.items, choice.logprobs.top_logprobs)
        ],
    )


def test_concurrent_requests_are_answered_as_the_reference_answers(server):
    running, reference = server
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(lambda ids: complete(running, ids), PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_answer_bf16_close(reference, prompt, answer)


def test_a_request_that_its_client_leaves_does_not_disturb_the_others(server):
    running, reference = server

    async def leave() -> None:
        client = openai.AsyncOpenAI(
            base_url=f"{running.base_url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )
        stream = await client.completions.create(
            model=running.model,
            prompt=PROMPTS[2],
            max_tokens=800,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for _ in stream:
            break
        await stream.close()

    asyncio.run(leave())
    assert_answer_bf16_close(reference, PROMPTS[1], complete(running, PROMPTS[1]))


def test_sampling_with_a_seed_is_repeatable_and_follows_it(server):
    running, _ = server

    def sample(seed: int) -> list[int]:
        completion = running.client.completions.create(
            model=running.model,
            prompt=PROMPTS[1],
            max_tokens=12,
            temperature=1.5,
            top_p=0.95,
            seed=seed,
            presence_penalty=0.3,
            extra_body={"return_token_ids": True, "ignore_eos": True, "top_k": 50},
        )
        return completion.choices[0].token_ids

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
