"""Where OpenELM's tokenizer and chat format come from, and how a bad one is refused."""

import json
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the policy talks to vLLM's configuration")
from transformers import AutoTokenizer

from support.tokenizers import write_llama_tokenizer
from vllm_ascend_models.openelm import tokenizer as tokenizers
from vllm_ascend_models.openelm.tokenizer import (
    HUGGING_FACE_REPOSITORY,
    MODELSCOPE_REPOSITORY,
    TOKENIZER_VARIABLE,
    chat_template_path,
    choose_tokenizer,
)

HI = [{"role": "user", "content": "hi"}]
# The instruction-tuning recipe's text; its tokenizer puts one BOS in front.
RECIPE = "<|user|>\nhi</s>\n<|assistant|>\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv(TOKENIZER_VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)


@pytest.fixture
def fallback(tmp_path, monkeypatch):
    """A configured fallback with a chat template that is not OpenELM's."""
    directory = tmp_path / "llama-tokenizer"
    write_llama_tokenizer(directory, chat_template="not OpenELM's")
    monkeypatch.setenv(TOKENIZER_VARIABLE, str(directory))
    return directory


def model_config(directory: Path, **changes):
    """As much of vLLM's ModelConfig as the choice reads and writes."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {
        "model": str(directory),
        "tokenizer": str(directory),
        "revision": None,
        "tokenizer_revision": None,
        "tokenizer_mode": "auto",
        "skip_tokenizer_init": False,
        "hf_config": types.SimpleNamespace(vocab_size=512, bos_token_id=1),
    }
    return types.SimpleNamespace(**fields | changes)


def render(config, messages=HI, **kwargs):
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **kwargs
    )


def test_an_instruct_checkpoint_gets_the_recipes_format(tmp_path, fallback):
    config = model_config(tmp_path / "OpenELM-3B-Instruct")
    choose_tokenizer(config)
    assert render(config) == "<s>" + RECIPE
    several = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "你好"},
    ]
    assert render(config, several) == (
        "<s><|system|>\nBe brief.</s>\n<|user|>\nhi</s>\n<|assistant|>\nHello.</s>\n"
        "<|user|>\n你好</s>\n<|assistant|>\n"
    )


def test_a_base_checkpoint_gets_plain_text(tmp_path, fallback):
    config = model_config(tmp_path / "OpenELM-3B")
    choose_tokenizer(config)
    assert render(config) == "<s>hi"


def test_prompts_and_chats_begin_with_exactly_one_bos(tmp_path, fallback):
    config = model_config(tmp_path / "OpenELM-3B-Instruct")
    choose_tokenizer(config)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    prompt = tokenizer("hi").input_ids
    # vLLM renders a chat to text and encodes it without special tokens.
    chat = tokenizer(render(config), add_special_tokens=False).input_ids
    for token_ids in (prompt, chat):
        assert token_ids[0] == 1
        assert token_ids.count(1) == 1
    assert chat == tokenizer(RECIPE).input_ids


def test_the_copy_tokenizes_as_its_source_and_is_made_once(tmp_path, fallback):
    config = model_config(tmp_path / "OpenELM-270M")
    choose_tokenizer(config)
    again = model_config(tmp_path / "OpenELM-270M")
    choose_tokenizer(again)
    assert again.tokenizer == config.tokenizer
    source = AutoTokenizer.from_pretrained(fallback)
    copied = AutoTokenizer.from_pretrained(config.tokenizer)
    text = "OpenELM 你好，世界! def f(x): return x**2 \n\t🙂"
    assert copied(text).input_ids == source(text).input_ids
    assert copied.decode(copied(text).input_ids, skip_special_tokens=True) == text
    cached = Path(config.tokenizer).parent
    assert [x.name for x in cached.iterdir()] == [Path(config.tokenizer).name]


def test_a_checkpoints_own_tokenizer_and_template_stay(tmp_path, fallback):
    directory = tmp_path / "OpenELM-own-Instruct"
    write_llama_tokenizer(directory, chat_template="its own")
    config = model_config(directory)
    choose_tokenizer(config)
    assert config.tokenizer == str(directory)


def test_a_checkpoints_own_tokenizer_gets_a_template_if_it_has_none(tmp_path):
    directory = tmp_path / "OpenELM-own-Instruct"
    write_llama_tokenizer(directory, add_bos=False)
    config = model_config(directory)
    choose_tokenizer(config)
    assert render(config) == "<s>" + RECIPE


def test_an_explicit_tokenizer_wins(tmp_path, fallback):
    mine = tmp_path / "mine"
    write_llama_tokenizer(mine, chat_template="mine")
    config = model_config(tmp_path / "OpenELM-3B-Instruct", tokenizer=str(mine))
    choose_tokenizer(config)
    assert config.tokenizer == str(mine)


def test_an_explicit_tokenizer_without_a_template_gets_openelms(tmp_path, fallback):
    mine = tmp_path / "mine"
    write_llama_tokenizer(mine)
    config = model_config(tmp_path / "OpenELM-3B-Instruct", tokenizer=str(mine))
    choose_tokenizer(config)
    assert render(config) == "<s>" + RECIPE


@pytest.mark.parametrize("changes", [{"skip_tokenizer_init": True}])
def test_nothing_is_looked_for_when_no_tokenizer_is_wanted(tmp_path, changes):
    config = model_config(tmp_path / "OpenELM-3B", **changes)
    choose_tokenizer(config)
    assert config.tokenizer == config.model


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ({"vocab_size": 600}, "has 600 tokens, the model 512"),
        ({"add_bos": False}, "does not put one BOS"),
    ],
)
def test_a_fallback_that_does_not_fit_is_refused(
    tmp_path, monkeypatch, tokenizer, said
):
    write_llama_tokenizer(tmp_path / "other", **tokenizer)
    monkeypatch.setenv(TOKENIZER_VARIABLE, str(tmp_path / "other"))
    with pytest.raises(ValueError, match=said) as refused:
        choose_tokenizer(model_config(tmp_path / "OpenELM-3B"))
    assert "--tokenizer" in str(refused.value)
    assert TOKENIZER_VARIABLE in str(refused.value)


def test_a_vocabulary_of_the_right_size_that_is_not_llama_2s_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(TOKENIZER_VARIABLE, str(tmp_path / "other"))
    apples = types.SimpleNamespace(vocab_size=32000, bos_token_id=1)
    right = {"▁the": 278, "▁Once": 9038, "▁Hello": 15043}
    for pieces, fits in (right, True), (right | {"▁Once": 5713}, False):
        write_llama_tokenizer(tmp_path / "other", vocab_size=32000, pieces_at=pieces)
        config = model_config(tmp_path / "OpenELM-3B", hf_config=apples)
        if fits:
            choose_tokenizer(config)
        else:
            with pytest.raises(ValueError, match="numbers tokens otherwise than Llama"):
                choose_tokenizer(config)


def test_a_fallback_directory_without_a_vocabulary_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKENIZER_VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json or"):
        choose_tokenizer(model_config(tmp_path / "OpenELM-3B"))


def test_an_unreachable_fallback_names_the_flag_and_the_variable(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(name, **_):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="no route to host") as refused:
        choose_tokenizer(model_config(tmp_path / "OpenELM-3B"))
    for word in (HUGGING_FACE_REPOSITORY, "--tokenizer", TOKENIZER_VARIABLE):
        assert word in str(refused.value)


def test_the_default_comes_from_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    write_llama_tokenizer(tmp_path / "snapshot")

    def download(name, **kwargs):
        asked.append(name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = model_config(tmp_path / "OpenELM-3B-Instruct")
    choose_tokenizer(config)
    assert asked == [HUGGING_FACE_REPOSITORY]
    assert render(config) == "<s>" + RECIPE


def test_the_default_comes_from_modelscope_where_vllm_uses_it(tmp_path, monkeypatch):
    asked = []
    write_llama_tokenizer(tmp_path / "snapshot")

    def download(name, **kwargs):
        asked.append(name)
        return str(tmp_path / "snapshot")

    module = types.ModuleType("modelscope.hub.snapshot_download")
    module.snapshot_download = download
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "modelscope.hub.snapshot_download", module)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    monkeypatch.setattr(tokenizers, "_has_tokenizer", lambda _: False)
    choose_tokenizer(model_config(tmp_path / "OpenELM-3B"))
    assert asked == [MODELSCOPE_REPOSITORY]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("apple/OpenELM-3B-Instruct", "instruct"),
        ("apple/OpenELM-3B", "base"),
        ("/models/instruct-models/OpenELM-3B", "base"),
        ("/models/openelm-270m-instruct/", "instruct"),
        ("/hub/models--apple--OpenELM-3B-Instruct/snapshots/0f1e2d", "instruct"),
        ("/hub/models--apple--OpenELM-3B/snapshots/0f1e2d", "base"),
    ],
)
def test_the_kind_of_checkpoint_is_read_from_its_name(model, kind):
    assert chat_template_path(model).name == f"chat_template_{kind}.jinja"


def test_the_copy_holds_no_code_and_no_weights(tmp_path, fallback):
    (fallback / "tokenization_evil.py").write_text("raise SystemExit")
    (fallback / "model.safetensors.index.json").write_text("{}")
    config = model_config(tmp_path / "OpenELM-3B")
    choose_tokenizer(config)
    names = sorted(file.name for file in Path(config.tokenizer).iterdir())
    assert names == [
        *("chat_template.jinja", "config.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    saved = json.loads((Path(config.tokenizer) / "tokenizer_config.json").read_text())
    assert "chat_template" not in saved
