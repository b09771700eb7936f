from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.config import ModelConfig, ReferenceConfig
from services.common.errors import InvalidData
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.packing import PackedBatch, pack
from services.trainer.model.policy import load_policy
from services.trainer.update.reference import Reference, check_reference, load_reference
from tests.support.trainer.model_families import make_model, make_samples

CPU = torch.device("cpu")
LENGTHS = [(4, 5), (1, 3), (6, 1), (2, 7)]


@pytest.fixture(scope="module")
def mixtral_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    make_model("mixtral", attention_dropout=0.3, router_jitter_noise=0.1).save_pretrained(directory)
    return directory


@pytest.fixture
def batch() -> PackedBatch:
    return pack(make_samples(LENGTHS, routing=(2, 8, 2), candidates=8))


def model_config(directory: Path, dtype: str = "float32") -> ModelConfig:
    return ModelConfig(path=str(directory), dtype=dtype)  # type: ignore[arg-type]


def test_by_default_it_is_the_model_and_sees_routing_and_candidates(
    mixtral_directory: Path, batch: PackedBatch
) -> None:
    reference = load_reference(ReferenceConfig(), model_config(mixtral_directory), device=CPU)
    policy = load_policy(str(mixtral_directory), dtype="float32")
    values = reference.logprobs(batch)
    assert not values.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(values, policy(batch)[0], rtol=0, atol=1e-6)
    assert not torch.allclose(values, reference.logprobs(batch.without_candidates()))
    assert not torch.allclose(values, reference.logprobs(batch, keep_routing=False))


def test_path_and_dtype_are_its_own(mixtral_directory: Path, tmp_path: Path, batch: PackedBatch) -> None:
    other = make_model("mixtral")
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    other.save_pretrained(tmp_path)
    config = ReferenceConfig(path=str(tmp_path), dtype="bfloat16")
    reference = load_reference(config, model_config(mixtral_directory), device=CPU)
    values = reference.logprobs(batch)
    own, model = (load_policy(str(path), dtype="bfloat16") for path in (tmp_path, mixtral_directory))
    with torch.no_grad():
        assert torch.equal(values, own(batch)[0])
        assert not torch.allclose(values, model(batch)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_is_near_and_not_equal(mixtral_directory: Path, batch: PackedBatch, dtype: str) -> None:
    model = model_config(mixtral_directory, dtype)
    exact = load_reference(ReferenceConfig(), model, device=CPU).logprobs(batch)
    rounded = load_reference(ReferenceConfig(dtype="int8"), model, device=CPU).logprobs(batch)
    assert rounded.dtype == torch.float32
    gap = float((rounded - exact).abs().mean())
    assert 0 < gap < (0.02 if dtype == "float32" else 0.05)


def test_a_reference_in_the_cpu_s_memory_does_not_go_to_the_trainer_s_device(
    mixtral_directory: Path, batch: PackedBatch
) -> None:
    # "meta" stands for a GPU: nothing comes out of it.
    elsewhere, model = torch.device("meta"), model_config(mixtral_directory)
    with pytest.raises((NotImplementedError, RuntimeError)):
        load_reference(ReferenceConfig(), model, device=elsewhere).logprobs(batch)
    kept = load_reference(ReferenceConfig(device="cpu"), model, device=elsewhere)
    assert torch.equal(kept.logprobs(batch), load_reference(ReferenceConfig(), model, device=CPU).logprobs(batch))


FACTS = ModelFacts("mixtral", 96, 2, 8, 2, packs=True)


@pytest.mark.parametrize(
    ("change", "keep_routing", "message"),
    [
        ({}, True, None),
        ({"model_type": "qwen3_moe"}, True, None),
        ({"vocabulary": 100}, False, "vocabulary 100, expected the policy's: 96"),
        ({"moe_layers": 0, "experts": 0, "experts_per_token": 0}, True, "moe_layers 0, expected the policy's: 2"),
        ({"moe_layers": 0, "experts": 0, "experts_per_token": 0}, False, None),
        ({"experts": 4}, True, "experts 4"),
        ({"packs": False}, False, "packs False"),
    ],
)
def test_a_reference_that_cannot_take_the_policy_s_batches_is_refused(
    change: dict[str, object], keep_routing: bool, message: str | None
) -> None:
    reference = replace(FACTS, **change)  # type: ignore[arg-type]
    if message is None:
        check_reference(reference, FACTS, keep_routing=keep_routing)
        return
    with pytest.raises(InvalidData, match=message) as refused:
        check_reference(reference, FACTS, keep_routing=keep_routing)
    assert refused.value.code == "reference_mismatch"


def test_a_reference_that_packs_serves_a_policy_that_does_not() -> None:
    check_reference(FACTS, replace(FACTS, packs=False), keep_routing=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("device", ["cpu", "trainer"])
def test_beside_a_policy_on_a_gpu(mixtral_directory: Path, batch: PackedBatch, device: str, dtype: str) -> None:
    config = ReferenceConfig(device=device, dtype=dtype)  # type: ignore[arg-type]
    model = model_config(mixtral_directory, "bfloat16")
    reference = load_reference(config, model, device=torch.device("cuda"))
    assert isinstance(reference, Reference)
    values = reference.logprobs(batch.to("cuda"))
    assert values.device.type == "cuda"
    expected = load_reference(ReferenceConfig(dtype="float32"), model_config(mixtral_directory), device=CPU)
    assert float((values.cpu() - expected.logprobs(batch)).abs().mean()) < 0.1
