"""The configuration as vLLM's engine arguments. Knows their names, not vLLM."""

from typing import Any, Literal

from services.common.config import Config, ConfigError

Capture = Literal["native", "worker_extension"]
EXTENSION = "services.rollout.vllm_engine.worker_extension.CaptureExtension"
# SamplingParams.extra_args of a request that is to be captured: {CAPTURE_KEY: {"id": key, "candidates": bool}}.
CAPTURE_KEY = "trivet"

# What would break the tie between a forwarded row and its position; the value is the one that is allowed.
EXTENSION_NEEDS: dict[str, Any] = {
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "speculative_config": None,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
}


def base_arguments(config: Config, *, seed: int, cpu: bool) -> dict[str, Any]:
    """Arguments that hold for both kinds of capture."""
    return {
        # Compiling takes longer than a small model's whole run on CPUs.
        "enforce_eager": cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **config.rollout.engine,
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_length,
        "seed": seed,
        "logprobs_mode": config.rollout.logprobs_mode,
        # Any number, the whole vocabulary too: Trivet asks for as many as the mode needs.
        "max_logprobs": -1,
        "worker_extension_cls": EXTENSION,
        **transfer_arguments(config),
    }


def transfer_arguments(config: Config) -> dict[str, Any]:
    """vLLM's engine for weights that come from the trainer's memory."""
    transfer = config.weights.transfer
    return {} if transfer == "disk" else {"weight_transfer_config": {"backend": transfer}}


def capture_arguments(config: Config, capture: Capture, *, moe: bool) -> dict[str, Any]:
    """Further arguments for one kind of capture. Raises ConfigError for an engine option that would make it inexact."""
    if capture == "native":
        if moe and not config.rollout.engine.get("enable_prefix_caching", True):
            raise ConfigError(
                "rollout.engine.enable_prefix_caching is False, expected True: "
                "vLLM keeps the routing that it returns with its prefix cache (rollout.capture)"
            )
        # Where vLLM has no prefix caching by default, as for hybrid models, it returns no routing without it.
        needed = {"enable_prefix_caching": True} if moe else {}
        return {"enable_return_routed_experts": moe, "return_sampling_mask": config.sampling.truncates, **needed}
    for name, allowed in EXTENSION_NEEDS.items():
        given = config.rollout.engine.get(name, allowed)
        if given != allowed:
            raise ConfigError(
                f"rollout.engine.{name} is {given!r}, expected {allowed!r}: "
                "the worker extension's capture would not be exact (rollout.capture)"
            )
    return {"enable_prefix_caching": False, "async_scheduling": False}
