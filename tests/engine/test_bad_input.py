"""What cannot be served is refused in the process that the user started.

Each case goes through vLLM's own configuration, as ``vllm serve`` and ``LLM`` do
before they start an engine.
"""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from support.checkpoints import TINY, openelm_config, write_openelm_checkpoint
from support.engine import EngineError, Round, run_engine
from support.tokenizers import write_llama_tokenizer

REMOTE_CODE = "raise SystemExit('remote code ran')\n"


@pytest.fixture
def checkpoint(tmp_path):
    write_openelm_checkpoint(tmp_path, TINY)
    return tmp_path


def configure(checkpoint, **engine_args):
    """Everything that happens before an engine starts."""
    arguments = {"skip_tokenizer_init": True} | engine_args
    return EngineArgs(model=str(checkpoint), **arguments).create_engine_config()


def edit(checkpoint, **keys):
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def respoil(checkpoint, spoil):
    from safetensors.torch import load_file

    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file)


OUT_PROJ = "transformer.layers.2.attn.out_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.pop(OUT_PROJ), "lacks tensor `transformer.layers.2.attn.out_proj"),
        (lambda t: t.update(foo=torch.ones(2)), "holds a tensor `foo`"),
        (lambda t: t.update({OUT_PROJ: torch.ones(128, 255)}), "has shape .128, 255."),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_a_tensor_that_does_not_belong_is_named(checkpoint, spoil, said):
    respoil(checkpoint, spoil)
    with pytest.raises(ValueError, match=said):
        configure(checkpoint)


def test_a_truncated_weight_file_is_named(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="cut short inside tensor"):
        configure(checkpoint)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_stop_the_engine(checkpoint, value):
    respoil(checkpoint, lambda tensors: tensors[OUT_PROJ][0].fill_(value))
    with pytest.raises(EngineError, match="256 values that are NaN or infinite"):
        run_engine(checkpoint, [Round([[1]])], max_model_len=64)


@pytest.mark.parametrize("content", ['{"model_type": "openelm", ', "weights: 7\n", ""])
def test_a_broken_config_json_is_said_to_be_one(checkpoint, content):
    (checkpoint / "config.json").write_text(content)
    with pytest.raises((OSError, ValueError), match=r"config\.json|JSON|config file"):
        configure(checkpoint)


def test_a_bad_field_of_config_json_is_named(checkpoint):
    edit(checkpoint, num_kv_heads=[1, 2, 2, 5])
    with pytest.raises(ValueError, match=r"num_query_heads\[3\]. is 12"):
        configure(checkpoint)


@pytest.mark.parametrize("trust", [False, True])
def test_code_in_a_checkpoint_never_runs(checkpoint, trust):
    for name in ("configuration_openelm", "modeling_openelm", "tokenization_openelm"):
        (checkpoint / f"{name}.py").write_text(REMOTE_CODE)
    auto_map = {
        "AutoConfig": "configuration_openelm.OpenELMConfig",
        "AutoModelForCausalLM": "modeling_openelm.OpenELMForCausalLM",
    }
    edit(checkpoint, auto_map=auto_map)
    write_llama_tokenizer(checkpoint)
    tokenizer_config = checkpoint / "tokenizer_config.json"
    keys = json.loads(tokenizer_config.read_text())
    keys["auto_map"] = {"AutoTokenizer": ["tokenization_openelm.Tokenizer", None]}
    tokenizer_config.write_text(json.dumps(keys))
    config = configure(
        checkpoint, trust_remote_code=trust, skip_tokenizer_init=False
    ).model_config
    assert config.trust_remote_code is False
    from vllm.tokenizers import cached_tokenizer_from_config

    assert cached_tokenizer_from_config(config)("hi").input_ids[0] == 1


def test_a_context_beyond_the_models_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"2049.*2048"):
        configure(checkpoint, max_model_len=2049)
    assert configure(checkpoint).model_config.max_model_len == 2048


def test_a_split_that_does_not_work_names_those_that_do(checkpoint):
    with pytest.raises(ValueError, match=r"size 3 cannot split.*work: 1, 2, 4\."):
        configure(checkpoint, tensor_parallel_size=3, distributed_executor_backend="mp")


def test_quantised_weights_with_uneven_heads_are_refused(checkpoint):
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with pytest.raises(ValueError, match="not implemented for quantised weights"):
        configure(checkpoint, quantization="fp8", **parallel)


def test_float16_is_refused_with_its_reason(checkpoint):
    with pytest.raises(ValueError, match=r"float16.*overflow"):
        configure(checkpoint, dtype="float16")


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_dtype_auto_never_lands_on_float16(checkpoint, stored):
    edit(checkpoint, torch_dtype=stored)
    assert configure(checkpoint).model_config.dtype in (torch.bfloat16, torch.float32)


def test_pickled_weights_are_never_read(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        configure(checkpoint)
    with pytest.raises(ValueError, match="load-format pt reads pickled weights"):
        configure(checkpoint, load_format="pt")


def test_no_reachable_tokenizer_is_said_before_weights_load(checkpoint, monkeypatch):
    monkeypatch.setenv("OPENELM_TOKENIZER", str(checkpoint / "nowhere"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="--tokenizer, or set OPENELM_TOKENIZER"):
        configure(checkpoint, skip_tokenizer_init=False)


def test_multipliers_that_disagree_with_the_lists_are_one_warning(checkpoint, caplog):
    edit(checkpoint, qkv_multipliers=[0.5, 0.5])
    configure(checkpoint)
    said = [r for r in caplog.records if "qkv_multipliers" in r.getMessage()]
    assert len(said) == 1


def test_lists_that_agree_with_the_multipliers_are_not_mentioned(tmp_path, caplog):
    agreeing = openelm_config(
        model_dim=128,
        head_dim=32,
        num_query_heads=[4, 4],
        num_kv_heads=[1, 1],
        ffn_multipliers=[1.0, 1.0],
    )
    write_openelm_checkpoint(tmp_path, agreeing)
    configure(tmp_path)
    assert not [r for r in caplog.records if "qkv_multipliers" in r.getMessage()]
