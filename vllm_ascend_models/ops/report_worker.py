"""The process in which `report` builds a model and looks at what its layers launch.

    python -m vllm_ascend_models.ops.report_worker CONFIG_DIRECTORY RESULT_FILE

The engine is in this very process. It answers one prompt with two tokens: a prefill and
a decode step, in which a layer is called once, or once for each layer that shares it.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# Where the emulated NPU (tests/ascend/emulator) logs each kernel, a JSON object a line.
LAUNCH_LOG = "NPU_EMULATOR_LAUNCH_LOG"
_MODEL = ""  # the whole model, whose kernels outside of its layers are a row too
_LAYERS = "vllm.model_executor.layers"
_ALLOCATIONS = ("empty", "new_empty", "resize_", "set_")


@dataclass
class Component:
    """A layer of the model.

    Attributes:
        name: in the model.
        vllm_class: the layer of vLLM that it is or replaces.
        used_class: its own class, with its module.
        calls: the kernels of each call; the first half is the prefill's.
    """

    name: str
    vllm_class: str
    used_class: str
    calls: list[dict[str, int]] = field(default_factory=list)


def main(directory: Path, result: Path) -> None:
    """Build the model of a config.json with dummy weights, and write its components."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=16,
    )
    [model] = llm.collective_rpc(lambda worker: worker.model_runner.model)
    components = find_components(model)
    sampling = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, detokenize=False
    )
    prompt = {"prompt_token_ids": list(range(1, 9))}
    with _watching(model, components):
        llm.generate([prompt], sampling, use_tqdm=False)
    found = {
        "device": current_platform.device_type,
        "components": [asdict(component) for component in components],
    }
    result.write_text(json.dumps(found))


def find_components(model: torch.nn.Module) -> list[Component]:
    """The outermost layers of vLLM in a model, and the model itself."""
    found = [Component(_MODEL, type(model).__name__, _full_name(type(model)))]
    outer: list[str] = []
    for name, module in model.named_modules():
        bases = [x for x in type(module).__mro__ if x.__module__.startswith(_LAYERS)]
        if bases and not any(name.startswith(f"{x}.") for x in outer):
            outer.append(name)
            used = _full_name(type(module))
            found.append(Component(name, bases[0].__name__, used))
    return found


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@contextmanager
def _watching(model: torch.nn.Module, components: list[Component]) -> Iterator[None]:
    """Fill in the components' calls with what is launched in the block."""
    if LAUNCH_LOG in os.environ and (logs := list(_logs())):
        with _marked(model, components, lambda component: _logged(logs[0], component)):
            yield
    else:
        with (
            profile(activities=[ProfilerActivity.CPU]) as profiled,
            _marked(model, components, lambda x: record_function(f"layer:{x.name}")),
        ):
            yield
        read_profile(profiled.events(), components)
    whole, *layers = components
    for step, kernels in enumerate(whole.calls):
        outside = Counter(kernels)
        for layer in layers:
            half = len(layer.calls) // 2
            for call in layer.calls[step * half : (step + 1) * half]:
                outside.subtract(call)
        whole.calls[step] = dict(+outside)


@contextmanager
def _marked(
    model: torch.nn.Module,
    components: list[Component],
    mark: Callable[[Component], AbstractContextManager[Any]],
) -> Iterator[None]:
    modules = dict(model.named_modules())
    for component in components:
        module = modules[component.name]

        def forward(
            *args: Any,
            _forward: Callable[..., Any] = module.forward,
            _component: Component = component,
            **kwargs: Any,
        ) -> Any:
            with mark(_component):
                return _forward(*args, **kwargs)

        module.forward = forward
    try:
        yield
    finally:
        for component in components:
            del modules[component.name].forward


def _logs() -> Iterator[Path]:
    return Path(os.environ[LAUNCH_LOG]).glob(f"{os.getpid()}.jsonl")


@contextmanager
def _logged(log: Path, component: Component) -> Iterator[None]:
    """Count the lines that are written to the emulator's log in the block."""
    start = log.stat().st_size
    yield
    with log.open() as lines:
        lines.seek(start)
        names = (json.loads(line)["name"] for line in lines)
        component.calls.append(dict(Counter(names)))


def read_profile(events: Any, components: list[Component]) -> None:
    """Count the operators of each call that have a kernel of their own."""
    by_mark = {f"layer:{component.name}": component for component in components}
    for event in sorted(events, key=lambda event: event.time_range.start):
        if component := by_mark.get(event.name):
            component.calls.append(dict(Counter(_kernels(event))))


def _kernels(event: Any) -> Iterator[str]:
    for child in event.cpu_children:
        namespace, _, operator = child.name.partition("::")
        # What is made of other operators launches theirs; vLLM's own are such, too.
        is_composite = namespace == "vllm" or child.name in _composites()
        inner = list(_kernels(child)) if is_composite else []
        if inner:
            yield from inner
        elif (
            operator
            and not operator.startswith(_ALLOCATIONS)
            and child.name not in _views()
        ):
            yield child.name


@cache
def _composites() -> set[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name.partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if has_kernel(name, "CompositeImplicitAutograd")
    }


@cache
def _views() -> set[str]:
    """Operators that return their argument's memory, which launches nothing."""
    return {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if any(x.alias_info and not x.alias_info.is_write for x in schema.returns)
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
