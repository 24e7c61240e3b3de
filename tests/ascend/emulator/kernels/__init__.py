"""CPU kernels of the operators that CANN brings; importing this fills the table.

One module a family. A kernel takes host tensors, checks what CANN would check, computes
in fp32 and rounds once to the output's type.
"""

from ascend.emulator.kernels import (
    activation,
    attention,
    attention_atb,
    embedding,
    format,
    kv_cache,
    lora,
    norm,
    quantisation,
    rope,
    sampling,
)

__all__ = [
    "activation",
    "attention",
    "attention_atb",
    "embedding",
    "format",
    "kv_cache",
    "lora",
    "norm",
    "quantisation",
    "rope",
    "sampling",
]
