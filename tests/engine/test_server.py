"""Plain `vllm serve` on checkpoints that carry no tokenizer, as Apple's do."""

import json
import urllib.error
import urllib.request

import pytest

from support.checkpoints import TINY, write_openelm_checkpoint
from support.engine import engine_version
from support.server import serve
from support.tokenizers import write_llama_tokenizer

SAY_HI = {"messages": [{"role": "user", "content": "say hi"}]}

# What is served, with which flags, and how it renders SAY_HI.
SERVED = {
    "base": ("OpenELM-tiny", [], "say hi"),
    "instruct": (
        "OpenELM-tiny-Instruct",
        [],
        "<|user|>\nsay hi</s>\n<|assistant|>\n",
    ),
    "own template": (
        "OpenELM-tiny-Instruct",
        ["--chat-template", "{{ bos_token }}mine: {{ messages[0]['content'] }}"],
        "mine: say hi",
    ),
}


# `--chat-template` never reaches our code: one engine is enough to see it win.
if engine_version() < (0, 32):
    del SERVED["own template"]


@pytest.fixture(scope="module", params=SERVED)
def served(request, tmp_path_factory):
    """A server without a flag but the one it is about, and the chat text expected."""
    name, flags, text = SERVED[request.param]
    directory = tmp_path_factory.mktemp("served")
    write_openelm_checkpoint(directory / name, TINY)
    write_llama_tokenizer(directory / "tokenizer", chat_template="not OpenELM's")
    env = {
        "OPENELM_TOKENIZER": str(directory / "tokenizer"),
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "TORCHDYNAMO_DISABLE": "1",
    }
    with serve(directory / name, "--enforce-eager", *flags, env=env) as server:
        yield server, text


def post(server, path, body):
    """Status and JSON of a request as a client without a library would send it."""
    request = urllib.request.Request(
        f"{server.base_url}/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def tokens(server, body):
    status, answer = post(server, "tokenize", body)
    assert status == 200, answer
    return answer["tokens"]


def test_a_chat_request_is_answered(served):
    status, answer = post(served[0], "v1/chat/completions", SAY_HI | {"max_tokens": 4})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] >= 1


def test_a_chat_is_rendered_in_its_format_with_one_bos(served):
    server, text = served
    chat = tokens(server, SAY_HI)
    assert chat == tokens(server, {"prompt": text})
    assert chat[0] == 1
    assert chat.count(1) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [1, 600]},
        {"prompt": [1, -1]},
        {"prompt": [1] * 2049},
    ],
    ids=["empty", "no ids", "id too large", "negative id", "too long"],
)
def test_a_bad_request_is_refused_and_the_server_goes_on(served, bad):
    server, _ = served
    status, answer = post(server, "v1/completions", {"max_tokens": 2} | bad)
    assert status == 400, answer
    status, answer = post(
        server, "v1/completions", {"prompt": [1, 7, 9], "max_tokens": 2}
    )
    assert status == 200, answer
