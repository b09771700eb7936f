"""Models as they are stored: from a directory or the hub, without anything random in them."""

from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from services.common.errors import InvalidData
from services.trainer.model.attention import NAME, register_varlen_attention
from services.trainer.model.logprobs import LogitRule
from services.trainer.model.sharded_load import read_sharded
from services.trainer.model.sharding import Sharding

Attention = Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2"]

# Kernels for packed rows, in half precision and on GPUs only.
FLASH = ("varlen", "flash_attention_2")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
ENDS_BYTES = 2**20
# A policy is a function of its tokens: whatever is random in training is off.
_RANDOM_SUFFIXES = ("dropout", "dropout_prob", "_pdrop", "jitter_noise", "jitter_eps")


def read_model(
    path: str,
    *,
    dtype: Literal["float32", "bfloat16"],
    gradient_checkpointing: bool = False,
    attention: Attention = "auto",
    device: torch.device | None = None,
    sharding: Sharding | None = None,
) -> Any:
    """A transformers causal LM: sharded on `device` with `sharding`, whole on `device` under a flash kernel, which
    runs nowhere else, and otherwise on the CPU.

    Raises InvalidData for an attention that this dtype, device or model does not have, and as read_sharded does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = model_directory(path)
    config = _without_randomness(AutoConfig.from_pretrained(directory))
    check_attention(attention, dtype, device)
    chosen = {} if attention == "auto" else {"attn_implementation": _implementation(attention)}
    try:
        if sharding is None:
            model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=DTYPES[dtype], **chosen)
        else:
            model = read_sharded(directory, config, DTYPES[dtype], sharding, **chosen)
    except (ImportError, ValueError) as error:
        if attention == "auto":
            raise
        raise InvalidData(
            "attention_unsupported", f"model.attention is {attention}, which {config.model_type} cannot take ({error})"
        ) from error
    if attention in FLASH or sharding is not None:
        # Of a sharded model only the buffers move.
        model.to(device)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def check_attention(attention: Attention, dtype: str, device: torch.device | None) -> None:
    """Raises InvalidData where a flash kernel is asked for and cannot run."""
    if attention not in FLASH:
        return
    from transformers.utils import is_flash_attn_2_available

    where = device.type if device is not None else "cpu"
    if where != "cuda":
        raise InvalidData("attention_unsupported", f"model.attention is {attention} on {where}, expected a CUDA device")
    if dtype == "float32":
        raise InvalidData("attention_unsupported", f"model.attention is {attention} in float32, expected bfloat16")
    # Asked here: where the package is missing, transformers looks for one on the hub.
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise InvalidData(
            "attention_unsupported", "model.attention is flash_attention_2, but the package flash-attn is not installed"
        )


def _implementation(attention: Attention) -> str:
    """As transformers names it."""
    if attention != "varlen":
        return attention
    register_varlen_attention()
    return NAME


def weights_fingerprint(path: str) -> str:
    """Of the size of each file of weights and of the bytes at its ends: no two trainings share them."""
    digest = xxhash.xxh3_64()
    for file in sorted(model_directory(path).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(ENDS_BYTES))
            content.seek(max(0, size - ENDS_BYTES))
            digest.update(content.read(ENDS_BYTES))
    return digest.hexdigest()


def model_directory(path: str) -> Path:
    """`path` itself where it is a directory, else the hub snapshot of that id."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=CHECKPOINT_FILES))


def logit_rule(config: Any) -> LogitRule:
    """From the configuration's keys; the probe then checks it against the model's own logits."""
    text = config.get_text_config()
    multiplier = 1.0
    if getattr(text, "logits_scaling", None):
        multiplier /= float(text.logits_scaling)
    for name in ("logit_scale", "lm_head_multiplier"):
        if getattr(text, name, None):
            multiplier *= float(getattr(text, name))
    softcap = getattr(text, "final_logit_softcapping", None)
    return LogitRule(multiplier, float(softcap) if softcap else None)


def _without_randomness(config: Any) -> Any:
    for part in {id(config): config, id(config.get_text_config()): config.get_text_config()}.values():
        for name, value in vars(part).items():
            if name.endswith(_RANDOM_SUFFIXES) and isinstance(value, float) and value > 0:
                setattr(part, name, 0.0)
    return config
