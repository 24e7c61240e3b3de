"""What the process that `support.engine` starts does: one engine, several rounds.

The engine is in this very process, because we look at the scheduler's steps and at
the model's modules. Where there is more than one device, the models are in workers of
it: then only what comes back from them is seen.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.v1.sample.sampler import Sampler

from support.mutants import MUTANTS

Arrays = dict[str, np.ndarray]


def run_plan(plan: dict[str, Any], result_file: str) -> None:
    """Start the engine, run the rounds, save what came out as arrays (npz)."""
    os.environ.update(plan["env"])
    # Before 0.32, `logprobs_mode` did not reach prompt logprobs. Workers inherit it if
    # they are forked from this process.
    Sampler.compute_logprobs = staticmethod(lambda logits: logits.float())
    llm = LLM(
        skip_tokenizer_init=True,
        disable_log_stats=False,  # counts preemptions
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        **plan["engine_args"],
    )
    config = llm.llm_engine.vllm_config
    model, steps = None, []
    if config.parallel_config.world_size == 1:
        [runner] = llm.collective_rpc(lambda worker: worker.model_runner)
        model, steps = runner.model, _record_steps(runner)
    kv_heads = [
        sum(layer.num_kv_heads for layer in layers.values())
        for layers in llm.collective_rpc("get_kv_cache_spec")
    ]
    vocab = config.model_config.get_vocab_size()
    results: Arrays = {}
    for index, round_ in enumerate(plan["rounds"]):
        steps.clear()
        before = _preemptions(llm)
        with (
            MUTANTS[round_["mutant"]](model),
            _captured_layers(model, round_["capture_layers"]) as layers,
        ):
            outputs = _generate(llm, round_)
        facts: dict[str, Any] = {
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "num_cached_tokens": [output.num_cached_tokens or 0 for output in outputs],
            "steps": list(steps),
            "preemptions": _preemptions(llm) - before,
            "kv_heads": kv_heads,
        }
        results[f"{index}/facts"] = np.array(json.dumps(facts))
        results |= {f"{index}/layers/{name}": x for name, x in layers.items()}
        for i, output in enumerate(outputs):
            logits = _rows(output.outputs[0].logprobs, vocab)
            results[f"{index}/{i}/logits"] = logits
            if round_["prompt_logits"]:
                # vLLM gives no scores to the first token, which nothing predicts.
                results[f"{index}/{i}/prompt_logits"] = _rows(
                    output.prompt_logprobs, vocab
                )[1:]
    np.savez(result_file, **results)
    # vllm-ascend's workers are no daemons: this process would wait for them as it ends.
    llm.llm_engine.engine_core.shutdown()


def _generate(llm: LLM, round_: dict[str, Any]) -> list[Any]:
    sampling = SamplingParams(
        temperature=0,
        max_tokens=round_["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        prompt_logprobs=-1 if round_["prompt_logits"] else None,
        flat_logprobs=True,
    )
    prompts = [{"prompt_token_ids": ids} for ids in round_["prompts"]]
    return llm.generate(prompts, sampling, use_tqdm=False)


def _rows(flat: Any, vocab: int) -> np.ndarray:
    """vLLM's flat scores as ``[positions, vocab]``; NaN where it gave none."""
    rows = np.full((len(flat), vocab), np.nan, np.float32)
    ids = np.array(flat.token_ids, np.int64)
    scores = np.array(flat.logprobs, np.float32)
    bounds = zip(flat.start_indices, flat.end_indices, strict=True)
    for row, (start, end) in zip(rows, bounds, strict=True):
        row[ids[start:end]] = scores[start:end]
    return rows


def _record_steps(runner: Any) -> list[list[int]]:
    steps: list[list[int]] = []
    execute = runner.execute_model

    def recording(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            steps.append(list(scheduler_output.num_scheduled_tokens.values()))
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = recording
    return steps


def _preemptions(llm: LLM) -> int:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return metrics["vllm:num_preemptions"].value


@contextmanager
def _captured_layers(model: torch.nn.Module | None, wanted: bool) -> Iterator[Arrays]:
    """Collect each layer's stages under the names of `reference.LayerStages`.

    Inputs are copied before a module runs: fused norms work in place. Layers hand on
    a residual beside the hidden states; their sum is the stream.
    """
    found: Arrays = {}
    handles = []

    def watch(module: torch.nn.Module, name: str, inputs: tuple[str, ...]) -> None:
        def keep(stage: str, stream: torch.Tensor) -> None:
            found[f"{name}_{stage}"] = stream.clone().numpy()

        def before(_: Any, args: Any, kwargs: Any) -> None:
            given = dict(zip(inputs, args, strict=False)) | kwargs
            residual = given.get("residual")
            keep("in", given["hidden_states"] + (0 if residual is None else residual))

        def after(_: Any, __: Any, output: Any) -> None:
            keep("out", sum(output) if isinstance(output, tuple) else output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    for i, layer in enumerate(model.transformer.layers if model and wanted else ()):
        watch(layer, f"{i}.layer", ("positions", "hidden_states", "residual"))
        watch(layer.attn, f"{i}.attn", ("positions", "hidden_states"))
        watch(layer.ffn, f"{i}.ffn", ("hidden_states",))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
