"""What the kernel is told, by one in plain torch with its contract; the real one needs a GPU (`make gpu-check`)."""

import pytest
import torch
from torch import nn

from services.common.errors import InvalidData
from services.trainer.model import attention as varlen
from tests.support.trainer.model_families import make_model

LENGTHS = (5, 1, 7)


def plain_kernel(query, key, value, starts, key_starts, longest, key_longest, *, scale, window_size, enable_gqa):
    """torch.nn.attention.varlen.varlen_attn: (left, 0) sees itself and `left` tokens before it, -1 all of them."""
    assert starts.dtype == torch.int32
    assert starts.tolist() == key_starts.tolist()
    assert longest == key_longest == len(query)
    assert query.shape[-1] == value.shape[-1]
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right == 0
    outputs = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (back >= 0) & ((back <= left) if left >= 0 else True)
        parts = [part[start:end].transpose(0, 1)[None] for part in (query, key, value)]
        out = nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def kernel(monkeypatch):
    varlen.register_varlen_attention()
    monkeypatch.setattr(varlen, "varlen_attn", plain_kernel)


def packed():
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return (torch.arange(sum(LENGTHS)) * 5 % 37 + 1)[None], positions


def forward(model, attention, ids, positions):
    model.set_attn_implementation(attention)
    return model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "minimax_m2", "qwen3"])
def test_packed_samples_have_the_values_and_gradients_of_a_masked_row(kernel, family):
    # Latent attention with values narrower than keys.
    narrow = {"v_head_dim": 8} if family == "deepseek_v3" else {}
    model = make_model(family, dtype=torch.float64, **narrow).eval()
    ids, positions = packed()
    found = {}
    for attention in ("sdpa", varlen.NAME):
        model.zero_grad()
        logits = forward(model, attention, ids, positions)
        logits.square().mean().backward()
        found[attention] = logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(found[varlen.NAME], found["sdpa"], rtol=1e-9, atol=1e-10)


def test_a_sliding_window_counts_the_token_itself(kernel):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=64, num_key_value_heads=2, sliding_window=3, **sizes)
    model = MistralForCausalLM(config).double().eval()
    ids, positions = packed()
    with torch.no_grad():
        ours, masked = (forward(model, attention, ids, positions) for attention in (varlen.NAME, "sdpa"))
    torch.testing.assert_close(ours, masked, rtol=1e-9, atol=1e-10)


def test_the_samples_of_a_row_are_looked_for_once(kernel, monkeypatch):
    asked = []
    nonzero = torch.nonzero
    monkeypatch.setattr(varlen.torch, "nonzero", lambda *arguments: asked.append(1) or nonzero(*arguments))
    model = make_model("qwen3_moe").eval()
    assert model.config.num_hidden_layers > 1
    for _ in range(2):
        ids, positions = packed()
        with torch.no_grad():
            forward(model, varlen.NAME, ids, positions)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1, 4)}, "a mask"),
        ({"position_ids": None}, "without position ids"),
    ],
)
def test_what_the_kernel_does_not_compute_is_refused(kernel, changed, named):
    parts = {name: torch.zeros(1, 2, 4, 8) for name in ("query", "key", "value")}
    given = {"attention_mask": None, "position_ids": torch.arange(4)[None], **parts, **changed}
    with pytest.raises(InvalidData, match=named) as refusal:
        varlen.varlen_attention(nn.Linear(1, 1), **given)
    assert refusal.value.code == "attention_unsupported"
