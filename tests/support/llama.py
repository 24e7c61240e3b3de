"""Random checkpoints of Llama 3.1's geometry, few layers of it, and LoRA adapters."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# The scaling of every published Llama 3.1; frequencies of its config.json.
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def write_llama_checkpoint(path: Path, *, num_layers: int = 2, seed: int = 0) -> None:
    """Write a random Llama 3.1 in bf16: heads of 128, 4 query heads a KV head.

    Args:
        path: directory, made if it is not there.
        num_layers: decoder layers.
        seed: of the weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=896,  # 3.5 times as wide, as the 8B's
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=512,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=ROPE_SCALING,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Attention that picks, and logits up to about 10: see
            # `support.checkpoints.random_tensors`.
            gain = 1.0 if "embed" in name else 1.4 * parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, std=gain)
    model.to(torch.bfloat16).save_pretrained(path)


def write_lora(path: Path, checkpoint: Path, *, rank: int = 8, seed: int = 0) -> None:
    """Write a random LoRA adapter for a checkpoint of ours, as `peft` writes them."""
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(_LORA_TARGETS):
            rows, columns = weight.shape
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                key = f"base_model.model.{module}.lora_{part}.weight"
                scale = shape[1] ** -0.5
                random = torch.randn(shape, generator=generator) * scale
                adapter[key] = random.to(torch.bfloat16)
    path.mkdir(parents=True)
    save_file(adapter, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,  # scaling 1: what is added is B·A
        "target_modules": list(_LORA_TARGETS),
        "bias": "none",
        "base_model_name_or_path": str(checkpoint),
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))


def add_lora(model: torch.nn.Module, path: Path) -> None:
    """Add an adapter of ours to the weights of transformers' model, in place."""
    adapter = load_file(path / "adapter_model.safetensors")
    for key, b in adapter.items():
        if ".lora_B." in key:
            a = adapter[key.replace(".lora_B.", ".lora_A.")]
            module = key.removeprefix("base_model.model.").partition(".lora_B")[0]
            weight = model.get_submodule(module).weight
            weight.data += (b.float() @ a.float()).to(weight.dtype)
