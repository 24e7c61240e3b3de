"""A tokenizer and a chat template for checkpoints that carry neither.

Apple's repositories hold no tokenizer: OpenELM was trained with the Llama-2 one.
Where none is given we take a configured one or an ungated repository of the same
vocabulary. A tokenizer without a chat template, or the fallback's with one that is
not OpenELM's, is copied into vLLM's cache beside the right template, because the
path is what reaches every process of vLLM.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

TOKENIZER_VARIABLE = "OPENELM_TOKENIZER"
# Apache-2.0, ungated, the Llama-2 vocabulary; and its mirror on ModelScope.
HUGGING_FACE_REPOSITORY = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
MODELSCOPE_REPOSITORY = "AI-ModelScope/TinyLlama-1.1B-Chat-v1.0"

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")

# Mistral's vocabulary has as many tokens and the same BOS: these tell it apart.
_LLAMA_2_SIZE = 32000
_LLAMA_2_TOKENS = {"▁the": 278, "▁Once": 9038, "▁Hello": 15043}

_logger = logging.getLogger("vllm.ascend_models")


def choose_tokenizer(model_config: "ModelConfig") -> None:
    """Point ``model_config.tokenizer`` at one that exists and can render a chat.

    An explicit ``--tokenizer`` and a checkpoint's own files are kept, with a chat
    template added if they have none.

    Raises:
        ValueError: there is no tokenizer, the fallback cannot be reached, or it is
            not OpenELM's; the message names ``--tokenizer`` and the variable.
    """
    if model_config.skip_tokenizer_init:
        return
    if model_config.tokenizer_mode not in ("auto", "hf"):
        return
    if model_config.tokenizer != model_config.model or _has_tokenizer(model_config):
        directory = _existing_directory(model_config)
        if directory is None or _has_chat_template(directory):
            return
        name, fallback = model_config.tokenizer, False
    else:
        name, fallback = _fallback_name(), True
        directory = _fallback_directory(name)
    template = chat_template_path(model_config.model)
    model_config.tokenizer = str(_copy_with_template(directory, template))
    model_config.tokenizer_revision = None
    if fallback:
        _check_tokenizer(model_config, name)
    _logger.info(
        "Tokenizer %s with the chat template %s. Override with --tokenizer or %s, "
        "and --chat-template.",
        name,
        template.name,
        TOKENIZER_VARIABLE,
    )


def chat_template_path(model: str) -> Path:
    """The template for a model name or path: by its last part, Instruct or base."""
    # A snapshot in the hub's cache is named by its commit: its repository is above.
    repository = re.search(r"models--([^/]+)/snapshots/", model)
    name = repository[1] if repository else Path(model).name
    kind = "instruct" if "instruct" in name.lower() else "base"
    return Path(__file__).with_name(f"chat_template_{kind}.jinja")


def _has_tokenizer(model_config: "ModelConfig") -> bool:
    from vllm.transformers_utils.repo_utils import list_repo_files

    files = list_repo_files(model_config.model, revision=model_config.revision)
    return any(name in files for name in _VOCABULARY_FILES)


def _existing_directory(model_config: "ModelConfig") -> Path | None:
    try:
        return _local_directory(
            str(model_config.tokenizer), model_config.tokenizer_revision
        )
    except Exception as error:
        # It is the user's own choice, and vLLM is about to load it: its error is
        # about the tokenizer. If it succeeds, chat lacks what we could not look for.
        _logger.warning(
            "Could not see whether tokenizer %s has a chat template (%s). If chat "
            "answers 400, pass --chat-template.",
            model_config.tokenizer,
            error,
        )
        return None


def _fallback_name() -> str:
    from vllm import envs

    if configured := os.environ.get(TOKENIZER_VARIABLE):
        return configured
    return (
        MODELSCOPE_REPOSITORY if envs.VLLM_USE_MODELSCOPE else HUGGING_FACE_REPOSITORY
    )


def _fallback_directory(name: str) -> Path:
    try:
        directory = _local_directory(name, revision=None)
    except Exception as error:
        raise _no_tokenizer(f"{name} cannot be fetched ({error})") from error
    if not any((directory / file).is_file() for file in _VOCABULARY_FILES):
        raise _no_tokenizer(f"{name} holds no {' or '.join(_VOCABULARY_FILES)}")
    return directory


def _local_directory(name: str, revision: str | None) -> Path:
    """Directory of a tokenizer given by path or repository id, fetched if need be."""
    from vllm import envs

    if Path(name).is_dir():
        return Path(name)
    if envs.VLLM_USE_MODELSCOPE:
        from modelscope.hub.snapshot_download import snapshot_download as fetch

        ignored = [r".*\.pt", r".*\.safetensors", r".*\.bin"]
        return Path(fetch(name, revision=revision, ignore_file_pattern=ignored))
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(name, revision=revision, allow_patterns=_TOKENIZER_FILES)
    )


def _has_chat_template(directory: Path) -> bool:
    if any(directory.glob("chat_template.*")):
        return True
    config = directory / "tokenizer_config.json"
    return config.is_file() and bool(
        json.loads(config.read_text()).get("chat_template")
    )


def _copy_with_template(directory: Path, template: Path) -> Path:
    """Copy tokenizer files and template into vLLM's cache, named by their content."""
    from vllm import envs

    files = {
        file.name: _without_chat_template(file)
        for pattern in _TOKENIZER_FILES
        for file in sorted(directory.glob(pattern))
        if not file.name.startswith("chat_template")
        and not file.name.endswith(".index.json")
    }
    files["chat_template.jinja"] = template.read_bytes()
    # Without a configuration vLLM logs an error before it goes on.
    files.setdefault("config.json", b'{"model_type": "openelm"}')
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    target = Path(envs.VLLM_CACHE_ROOT) / "openelm_tokenizers" / digest
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent))
    for name, content in files.items():
        (staging / name).write_bytes(content)
    try:
        staging.rename(target)
    except OSError:
        # Another server made the same directory meanwhile: the same content.
        shutil.rmtree(staging)
    return target


def _without_chat_template(file: Path) -> bytes:
    content = file.read_bytes()
    if file.name != "tokenizer_config.json":
        return content
    config: dict[str, Any] = json.loads(content)
    config.pop("chat_template", None)
    return json.dumps(config, indent=2).encode()


def _check_tokenizer(model_config: "ModelConfig", name: str) -> None:
    from transformers import AutoTokenizer

    config = model_config.hf_config
    tokenizer = AutoTokenizer.from_pretrained(model_config.tokenizer)
    if len(tokenizer) > config.vocab_size:
        raise _no_tokenizer(
            f"{name} has {len(tokenizer)} tokens, the model {config.vocab_size}"
        )
    if config.vocab_size == _LLAMA_2_SIZE:
        found = {x: tokenizer.convert_tokens_to_ids(x) for x in _LLAMA_2_TOKENS}
        if found != _LLAMA_2_TOKENS:
            raise _no_tokenizer(
                f"{name} numbers tokens otherwise than Llama-2, {found} instead of "
                f"{_LLAMA_2_TOKENS}"
            )
    token_ids = tokenizer("OpenELM").input_ids
    if token_ids[:1] != [config.bos_token_id] or config.bos_token_id in token_ids[1:]:
        raise _no_tokenizer(
            f"{name} does not put one BOS (token {config.bos_token_id}) in front of a "
            f"prompt, but encodes 'OpenELM' as {token_ids}"
        )


def _no_tokenizer(reason: str) -> ValueError:
    return ValueError(
        f"No tokenizer for this OpenELM checkpoint, which carries none: {reason}. Pass "
        f"--tokenizer, or set {TOKENIZER_VARIABLE}, to a directory or repository with "
        f"the Llama-2 tokenizer (32000 tokens, BOS 1)."
    )
