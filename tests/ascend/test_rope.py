"""Llama 3's RoPE on NPUs: which class, and the angles of the formula."""

import json
import math
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.plugins import load_general_plugins

from vllm_ascend_models.ops import npu

POSITIONS = [0, 1, 8191, 8192, 30000, 131071]
FACTOR, LOW, HIGH, ORIGINAL, THETA = 8.0, 1.0, 4.0, 8192, 500000.0
SCALING = {
    "factor": FACTOR,
    "low_freq_factor": LOW,
    "high_freq_factor": HIGH,
    "original_max_position_embeddings": ORIGINAL,
}
# The ways in which a config.json says it: today's, the first Llama 3.1's, and that of
# transformers 5.
THETA_BESIDE = {"rope_theta": THETA}
FORMS = {
    "rope_type": THETA_BESIDE | {"rope_scaling": SCALING | {"rope_type": "llama3"}},
    "type": THETA_BESIDE | {"rope_scaling": SCALING | {"type": "llama3"}},
    "rope_parameters": {
        "rope_parameters": SCALING | THETA_BESIDE | {"rope_type": "llama3"}
    },
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}


def formula(head_size: int) -> torch.Tensor:
    """Angles ``[positions, head_size / 2]`` in fp64, from the Llama 3.1 release."""
    frequencies = []
    for pair in range(head_size // 2):
        frequency = THETA ** (-2 * pair / head_size)
        turns = ORIGINAL * frequency / (2 * math.pi)  # in the original context
        smooth = min(max((turns - LOW) / (HIGH - LOW), 0), 1)
        frequencies.append(frequency * (smooth + (1 - smooth) / FACTOR))
    return torch.outer(torch.tensor(POSITIONS).double(), torch.tensor(frequencies))


def rope_of(path: Path, form: dict, head_size: int):
    """The layer that vLLM's Llama would build from such a config.json on an NPU."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope
    from vllm_ascend.utils import register_ascend_customop

    load_general_plugins()
    (path / "config.json").write_text(json.dumps(LLAMA | form))
    arguments = EngineArgs(str(path), skip_tokenizer_init=True, max_model_len=1024)
    config = arguments.create_engine_config()
    parameters = config.model_config.hf_config.rope_parameters
    with set_current_vllm_config(config):
        register_ascend_customop(config)
        _ROPE_DICT.clear()
        return get_rope(
            head_size, 131072, rope_parameters=parameters, dtype=torch.float32
        )


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_angles_are_those_of_the_formula(tmp_path: Path, form: dict, head_size: int):
    rope = rope_of(tmp_path, form, head_size)
    assert type(rope).__name__ == "NPULlama3RotaryEmbedding"
    cos, sin = rope.cos_sin_cache.cpu()[POSITIONS].double().chunk(2, dim=-1)
    angles = formula(head_size)
    # fp32 rounds by 2⁻²⁴ a frequency, its scaling, its product with a position, and the
    # exponent of theta, which the logarithm of theta multiplies.
    exponents = torch.arange(head_size // 2).double() * 2 / head_size
    bound = angles * 2**-24 * (3 + exponents * math.log(THETA)) + 1e-6
    assert ((cos - angles.cos()).abs() <= bound).all()
    assert ((sin - angles.sin()).abs() <= bound).all()
    # A rotation, which keeps norms.
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), atol=1e-6, rtol=0)


# Prints what `register()` loaded of ours, and the class in use once RoPE is imported.
REGISTER = """
import sys
import vllm.platforms
assert vllm.platforms.current_platform.device_type == "npu"
import vllm_ascend_models
vllm_ascend_models.register()
print("OURS", "vllm_ascend_models.ops.rope" in sys.modules)
print("VLLM", "vllm.model_executor.layers.rotary_embedding" in sys.modules)
import vllm.model_executor.layers.rotary_embedding
from vllm.model_executor.custom_op import op_registry_oot
print("CLASS", op_registry_oot.get("Llama3RotaryEmbedding"))
"""


@pytest.mark.parametrize("broken", [False, True])
def test_registering_waits_for_rope_and_cannot_break_it(broken: bool):
    program = REGISTER
    if broken:
        unimportable = "import sys; sys.modules['vllm_ascend_models.ops.rope'] = 1"
        program = f"{unimportable}; {REGISTER}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert ("could not register its NPU layers" in done.stderr + done.stdout) == broken
    if not broken:
        assert "OURS False\nVLLM False\n" in done.stdout
        assert "CLASS <class 'vllm_ascend_models.ops.rope.NPULlama3" in done.stdout


def test_a_vllm_ascend_with_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(op_registry_oot, "Llama3RotaryEmbedding", raising=False)
    own = '"Llama3RotaryEmbedding": AscendLlama3RotaryEmbedding'
    with patch("inspect.getsource", lambda module: own):
        npu.register()
    assert "Llama3RotaryEmbedding" not in op_registry_oot


def test_nothing_is_registered_where_vllm_ascend_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delitem(op_registry_oot, "Llama3RotaryEmbedding", raising=False)
    monkeypatch.delitem(sys.modules, "vllm_ascend")
    npu.register()
    assert "Llama3RotaryEmbedding" not in op_registry_oot
