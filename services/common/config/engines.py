"""Which further arguments of vLLM and DeepSpeed are taken: those that change how fast, never what comes out."""

from collections.abc import Iterator, Mapping
from typing import Any

VLLM_OWNED = {
    "model",
    "dtype",
    "seed",
    "max_model_len",
    "logprobs_mode",
    "max_logprobs",
    "worker_extension_cls",
    "enable_return_routed_experts",
    "return_sampling_mask",
    "weight_transfer_config",
}
VLLM_TAKEN = {
    # parallelism
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "all2all_backend",
    "distributed_executor_backend",
    "distributed_timeout_seconds",
    "disable_custom_all_reduce",
    "max_parallel_loading_workers",
    # memory
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "block_size",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "cpu_offload_gb",
    # scheduling
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "async_scheduling",
    "speculative_config",
    # kernels
    "enforce_eager",
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "optimization_level",
    "performance_mode",
    "attention_backend",
    "attention_config",
    "disable_cascade_attn",
    "moe_backend",
    "linear_backend",
    "kernel_config",
    "enable_flashinfer_autotune",
    "mamba_backend",
    "gdn_prefill_backend",
    "kda_prefill_backend",
    "kda_decode_backend",
    # reading the model, and what is reported
    "load_format",
    "download_dir",
    "model_loader_extra_config",
    "safetensors_load_strategy",
    "language_model_only",
    "limit_mm_per_prompt",
    "use_tqdm_on_load",
    "disable_log_stats",
}
_SAMPLING = "each request carries its own sampling settings (sampling.*)"
_MODEL = "the trainer reads model.path as it is, and the two would differ"
_ADAPTERS = "every weight is trained and published, and there are no adapters"
VLLM_REFUSED = {
    "generation_config": "a sample ends where the model's own generation_config.json says",
    "override_generation_config": _SAMPLING,
    "logits_processors": "the trainer cannot replay what they do to the probabilities",
    "structured_outputs_config": _SAMPLING,
    "hf_overrides": _MODEL,
    "model_class_overrides": _MODEL,
    "hf_config_path": _MODEL,
    "revision": _MODEL,
    "code_revision": _MODEL,
    "tokenizer": _MODEL,
    "tokenizer_revision": _MODEL,
    "trust_remote_code": "the trainer runs no code out of a model's directory, and the two would differ",
    "quantization": "new weights come as the trainer has them, and are compared with what was loaded",
    "quantization_config": "new weights come as the trainer has them, and are compared with what was loaded",
    "enable_lora": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "enable_eplb": "experts move, and the captured routing would name others",
}

DEEPSPEED_OWNED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "gradient_clipping",
}
DEEPSPEED_TAKEN = {
    "zero_optimization",
    "communication_data_type",
    "comms_logger",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
}
ZERO_TAKEN = {
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "offload_optimizer",
    "offload_param",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "log_trace_cache_warnings",
}
_PARALLEL = "batches are split over all ranks, so ZeRO is the only way to spread a model (trainer.zero_stage)"
DEEPSPEED_REFUSED = {
    "tensor_parallel": _PARALLEL,
    "autotp_size": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "expert_parallel": _PARALLEL,
    "pipeline": _PARALLEL,
    "activation_checkpointing": "it has no effect on transformers' models (trainer.gradient_checkpointing does it)",
    "torch_autocast": "the dtype is model.dtype",
    "amp": "the dtype is model.dtype",
}


def vllm_problems(engine: Mapping[str, Any]) -> Iterator[str]:
    if owned := VLLM_OWNED & engine.keys():
        yield f"rollout.engine sets {sorted(owned)}, which Trivet sets itself from the rest of the configuration"
    yield from _unsupported("rollout.engine", engine, VLLM_TAKEN | VLLM_OWNED, VLLM_REFUSED)


def deepspeed_problems(extra: Mapping[str, Any]) -> Iterator[str]:
    zero = extra.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        yield f"trainer.deepspeed.zero_optimization is {zero!r}, expected keys and values"
        return
    owned = sorted(DEEPSPEED_OWNED & extra.keys()) + ["zero_optimization.stage"] * ("stage" in zero)
    if owned:
        yield f"trainer.deepspeed sets {owned}, which Trivet sets itself from the rest of the configuration"
    yield from _unsupported("trainer.deepspeed", extra, DEEPSPEED_TAKEN | DEEPSPEED_OWNED, DEEPSPEED_REFUSED)
    yield from _unsupported("trainer.deepspeed.zero_optimization", zero, ZERO_TAKEN | {"stage"}, {})
    for name in ("offload_optimizer", "offload_param"):
        place = zero.get(name)
        device = place.get("device") if isinstance(place, Mapping) else place
        if device not in {None, "none", "cpu"}:
            yield (
                f"trainer.deepspeed.zero_optimization.{name} is {place!r}, expected device cpu: "
                "a checkpoint's digest is taken of what is in memory"
            )


def _unsupported(section: str, given: Mapping[str, Any], taken: set[str], reasons: Mapping[str, str]) -> Iterator[str]:
    for key in sorted(given.keys() - taken):
        if key in reasons:
            yield f"{section}.{key} is not supported: {reasons[key]}"
        else:
            yield f"{section}.{key} is not supported, expected one of {', '.join(sorted(taken))}"
