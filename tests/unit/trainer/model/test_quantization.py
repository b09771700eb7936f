import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.trainer.model.quantization import RowScaled, quantize
from tests.support.trainer.model_families import MOE, make_model, make_samples


def quantized(model: nn.Module) -> dict[str, RowScaled]:
    """By the name of the weight."""
    return {
        f"{path}.{name}": parametrizations[0]
        for path, module in model.named_modules()
        if parametrize.is_parametrized(module)
        for name, parametrizations in module.parametrizations.items()  # type: ignore[union-attr, operator]
    }


def weight(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "inputs"), [((5, 7), -1), ((3, 5, 7), -1), ((3, 7, 5), -2)])
def test_no_weight_moves_by_more_than_half_its_row_s_scale(
    shape: tuple[int, ...], inputs: int, dtype: torch.dtype
) -> None:
    original = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.tensor(10.0)).to(dtype)
    original.select(inputs, 0)[0] = 0  # one value of several rows
    values, scales = RowScaled(inputs).right_inverse(original)
    assert values.dtype == torch.int8
    assert scales.dtype == dtype
    expected = [*shape]
    expected[inputs] = 1
    assert list(scales.shape) == expected
    largest = original.float().abs().amax(inputs, keepdim=True)
    torch.testing.assert_close(scales.float(), largest / 127, rtol=2**-8, atol=0)
    restored = RowScaled(inputs)(values, scales)
    assert restored.dtype == dtype
    # bf16 rounds the product once more.
    room = 0.5 * scales.float() * 1.001 + (largest * 2**-8 if dtype == torch.bfloat16 else 0)
    assert bool(((restored.float() - original.float()).abs() <= room).all())
    assert int(values.abs().amax()) == 127


def test_a_row_of_zeros_stays_one() -> None:
    values, scales = RowScaled(-1).right_inverse(torch.zeros(2, 4))
    assert RowScaled(-1)(values, scales).abs().max() == 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2", *MOE])
def test_what_is_left_as_it_is(family: str) -> None:
    model, untouched = make_model(family), make_model(family)
    quantize(model)
    taken = quantized(model)
    assert taken
    before = dict(untouched.named_parameters())
    for name, parameter in before.items():
        owner = name.rpartition(".")[0]
        module = untouched.get_submodule(owner)
        kept = (
            parameter.ndim == 1
            or isinstance(module, nn.Embedding | nn.Conv1d)
            or module is untouched.get_output_embeddings()
            or type(module).__name__.endswith(("Router", "Gate"))
            or any(part in {"gate", "router", "shared_expert_gate"} for part in owner.split("."))
            or name.endswith("_bias")
        )
        assert (name not in taken) == kept, name
        now = weight(model, name)
        assert now.shape == parameter.shape
        assert torch.equal(now, parameter) == kept, name
    if family in MOE:
        assert any(name.endswith("experts.gate_up_proj") for name in taken)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_fused_experts_have_a_scale_for_each_expert_and_output(family: str) -> None:
    model = make_model(family)
    transposed = family == "gpt_oss"
    before = weight(model, "model.layers.0.mlp.experts.down_proj").detach().clone()
    quantize(model)
    scales = model.get_submodule("model.layers.0.mlp.experts").parametrizations.down_proj.original1
    largest = before.abs().amax(1 if transposed else 2)
    assert scales.shape == ((8, 1, 32) if transposed else (8, 32, 1))
    torch.testing.assert_close(scales.squeeze(), largest / 127, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["qwen3", *MOE])
def test_log_probs_are_those_of_the_rounded_weights(family: str) -> None:
    """A model whose weights are replaced by the restored ones must agree to the last bit."""
    policy, plain = Policy(make_model(family)), Policy(make_model(family))
    quantize(policy.model)
    with torch.no_grad():
        for name in quantized(policy.model):
            weight(plain.model, name).copy_(weight(policy.model, name))
    moe = policy.facts.moe_layers
    routing = (moe, 8, 2) if moe else None
    batch = pack(make_samples([(4, 5)], routing=routing, candidates=9))
    with torch.no_grad():
        assert torch.equal(policy(batch)[0], plain(batch)[0])


def test_int8_takes_a_quarter_of_float32_and_nothing_can_be_trained() -> None:
    wide = make_model("qwen3_moe", hidden_size=128, moe_intermediate_size=128, vocab_size=96)
    bytes_before = sum(p.numel() * p.element_size() for p in wide.parameters())
    kept = sum(
        p.numel() * p.element_size() for n, p in wide.named_parameters() if p.ndim == 1 or "embed" in n or "gate." in n
    )
    quantize(wide)
    bytes_after = sum(p.numel() * p.element_size() for p in wide.parameters())
    assert (bytes_after - kept) / (bytes_before - kept) == pytest.approx(0.25 + 1 / 128, rel=0.01)
    assert not any(parameter.requires_grad for parameter in wide.parameters())
