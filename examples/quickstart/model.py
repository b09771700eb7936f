"""A Qwen3-MoE of a quarter of a million parameters: every layer routes 2 of 8 experts."""

from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, *, max_length: int) -> Qwen3MoeForCausalLM:
    """Random weights in float32; `max_length` counts prompt and completion tokens together."""
    set_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model
