from typing import Any

import torch

from services.common.config import Config


def deepspeed_config(config: Config) -> dict[str, Any]:
    """What deepspeed.initialize gets, `trainer.deepspeed` merged in, which holds no key that Trivet sets itself."""
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
    return _merge(own, config.trainer.deepspeed)


def inference_config(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    """Of a model in addition to the policy that is never trained, with parameters of `dtype`."""
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
