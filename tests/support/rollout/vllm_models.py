"""A small model for vLLM, and how it is run in tests."""

import asyncio

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed
from trivet.v1 import sample_pb2

from services.common.config import parse_config

VOCABULARY, LAYERS, EXPERTS, TOP = 264, 2, 8, 2


PROMPT = [3, 40, 41, 42, 43, 44, 45, 46, 4]


TOP_K = sample_pb2.SamplingParameters(temperature=0.7, top_k=20, top_p=1.0, max_tokens=24)


TOP_KP = sample_pb2.SamplingParameters(temperature=0.9, top_k=20, top_p=0.8, max_tokens=24)


LONG = sample_pb2.SamplingParameters(temperature=1.0, top_k=20, top_p=0.95, max_tokens=500)


def make_tokenizer():
    special = [f"<|{name}|>" for name in ("pad", "end", "system", "user", "assistant", "a", "b", "c")]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def make_model(path, seed):
    tokenizer = make_tokenizer()
    assert len(tokenizer) == VOCABULARY
    set_seed(seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP,
            moe_intermediate_size=64,
            intermediate_size=64,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            initializer_range=0.1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def configuration(path, mode="processed_logprobs", *, engine=None, **sampling):
    return parse_config(
        {
            "run": {"name": "test"},
            "model": {"path": str(path), "dtype": "float32", "max_length": 2048},
            "data": {"train": {"kind": "jsonl", "path": "unused.jsonl"}},
            "sampling": sampling,
            "reward": {"scorers": [{"name": "exact_match"}]},
            "rollout": {"logprobs_mode": mode, "engine": engine or {}},
            "trainer": {"device": "cpu"},
        }
    )


def ids(count, name="s"):
    return [f"{name}/{i}" for i in range(count)]


async def begun(engine, count):
    """Returns once `count` recorded requests have been through a step."""
    async with asyncio.timeout(60):
        while await engine._llm.collective_rpc("trivet_held") != [count]:  # noqa: ASYNC110
            await asyncio.sleep(0)


def is_version(sample, version):
    return [(span.version, span.start, span.end) for span in sample.spans] == [(version, 0, len(sample.token_ids))]
