from typing import Any

import torch

from services.common.config import Config, ConfigError

_OWNED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "gradient_clipping",
}


def deepspeed_config(config: Config) -> dict[str, Any]:
    """What deepspeed.initialize gets, `trainer.deepspeed` merged in. Raises ConfigError for keys that Trivet owns."""
    extra = config.trainer.deepspeed
    taken = sorted(_OWNED & extra.keys())
    if "stage" in extra.get("zero_optimization", {}):
        taken.append("zero_optimization.stage")
    if taken:
        raise ConfigError(
            f"trainer.deepspeed sets {taken}, which Trivet sets itself from the rest of the configuration"
        )
    own = {
        # The number of micro-batches varies from step to step: the engine sets the accumulation boundary itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": config.trainer.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "gradient_clipping": config.trainer.optimizer.max_grad_norm,
        "steps_per_print": None,
    }
    return _merge(own, extra)


def inference_config(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    """Of a model beside the policy that is never trained, with parameters of `dtype`."""
    found = deepspeed_config(config)
    found["bf16"] = {"enabled": dtype == torch.bfloat16}
    found["zero_optimization"].pop("offload_optimizer", None)
    return found


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
