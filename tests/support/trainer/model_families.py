"""Tiny random models of each family, made on the spot."""

from typing import Any

import numpy as np
import torch

from services.common.wire.replay_data import CandidateSets, Replay
from services.trainer.batch.samples import TrainSample

VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen3_moe": {
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {**_LATENT, "num_hidden_layers": 3},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy", "norm_topk_prob": False},
    "glm4_moe": {
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "gpt_oss": {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    "minimax": {
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"] * 2,
    },
    "minimax_m2": {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_next": {
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "dots1": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
    },
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
}
MOE = [name for name in FAMILIES if name not in {"qwen3", "gemma2", "cohere", "phi"}]


def make_model(family: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Weights large enough that every part of the model matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if dtype == torch.float64 and family in MOE:
        # The grouped kernel has no float64.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif "bias" in name:
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.normal_(std=0.1)
    return model.train()


# As plain_engine's configuration has it.
MAX_TOKENS = 8


def make_samples(
    lengths: list[tuple[int, int]],
    *,
    routing: tuple[int, int, int] | None = None,
    candidates: int | None = None,
    seed: int = 3,
) -> list[TrainSample]:
    """`lengths` are (prompt, completion) tokens; `routing` is (layers, experts, experts per token)."""
    random = np.random.default_rng(seed)
    samples = []
    for index, (prompt, completion) in enumerate(lengths):
        tokens = random.integers(3, VOCABULARY, completion, dtype=np.int32)
        recorded = None
        if routing is not None:
            layers, experts, chosen = routing
            scores = random.random((prompt + completion - 1, layers, experts))
            recorded = np.argsort(scores, axis=2)[:, :, :chosen].astype(np.uint8)
        samples.append(
            TrainSample(
                sample_id=f"sample-{index}",
                prompt_token_ids=random.integers(3, VOCABULARY, prompt, dtype=np.int32),
                token_ids=tokens,
                rollout_logprobs=-random.random(completion).astype(np.float32),
                replay=Replay(recorded, candidate_sets(tokens, candidates, random) if candidates else None),
                advantage=float(random.normal()),
                temperature=0.7,
                max_tokens=max(MAX_TOKENS, *(longest for _, longest in lengths)),
            )
        )
    return samples


def candidate_sets(tokens: Any, most: int, random: np.random.Generator) -> CandidateSets:
    rows = []
    for token in tokens:
        others = random.permutation(VOCABULARY)[: random.integers(1, most + 1)]
        rows.append(np.unique(np.append(others, token)).astype(np.int32))
    return CandidateSets(np.array([len(row) for row in rows], dtype=np.int32), np.concatenate(rows))
