from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.common.errors import InvalidData
from services.common.wire.replay_data import Replay
from services.trainer.batch.packing import pack
from services.trainer.batch.samples import TrainSample
from services.trainer.model.policy import Policy, load_policy
from tests.support.trainer.model_families import FAMILIES, VOCABULARY, candidate_sets, make_model, make_samples

LENGTHS = [(4, 5), (1, 3), (6, 1), (2, 7)]


def native_logprobs(policy: Policy, sample: TrainSample) -> Tensor:
    """[C], the plain way: one sample, full logits of the model itself, dense mask, float64."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].double()
    prompt = len(sample.prompt_token_ids)
    scaled = logits[prompt - 1 : -1] / sample.temperature
    if sample.replay.candidates is not None:
        allowed = torch.zeros(scaled.shape, dtype=torch.bool)
        rows = np.repeat(np.arange(len(sample.token_ids)), sample.replay.candidates.counts)
        allowed[rows, sample.replay.candidates.token_ids.astype(np.int64)] = True
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    return scaled.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in {"gpt_oss", "qwen3_next"}])
@pytest.mark.parametrize("candidates", [None, 12], ids=["whole vocabulary", "candidates"])
def test_packed_log_probs_are_those_of_each_sample_alone(family: str, candidates: int | None) -> None:
    policy = Policy(make_model(family))
    samples = make_samples(LENGTHS, candidates=candidates)
    with torch.no_grad():
        values, entropies = policy(pack(samples), keep_routing=False)
    expected = torch.cat([native_logprobs(policy, sample) for sample in samples])
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-5)
    assert bool((entropies >= -1e-6).all())


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_families_that_would_mix_samples_are_told_apart_and_refused(family: str) -> None:
    policy = Policy(make_model(family))
    samples = make_samples(LENGTHS)
    assert not policy.facts.packs
    with pytest.raises(InvalidData, match="mixes packed samples") as refused:
        policy(pack(samples), keep_routing=False)
    assert refused.value.code == "packing_inexact"
    for sample in samples:
        with torch.no_grad():
            values, _ = policy(pack([sample]), keep_routing=False)
        torch.testing.assert_close(values.double(), native_logprobs(policy, sample), rtol=0, atol=1e-5)


def test_the_order_of_samples_does_not_matter() -> None:
    policy = Policy(make_model("qwen3_moe"))
    samples = make_samples(LENGTHS, candidates=9, routing=(2, 8, 2))
    with torch.no_grad():
        forwards, _ = policy(pack(samples))
        backwards, _ = policy(pack(samples[::-1]))
    turned = torch.cat(list(backwards.split([len(sample.token_ids) for sample in samples[::-1]]))[::-1])
    torch.testing.assert_close(forwards, turned, rtol=0, atol=1e-5)


def test_tampering_with_the_candidates_changes_log_probs_only_there() -> None:
    policy = Policy(make_model("qwen3"))
    samples = make_samples(LENGTHS, candidates=9)
    other = candidate_sets(samples[1].token_ids, 30, np.random.default_rng(99))
    tampered = [samples[0], replace(samples[1], replay=Replay(None, other)), *samples[2:]]
    with torch.no_grad():
        before, _ = policy(pack(samples))
        after, _ = policy(pack(tampered))
    changed = (before != after).tolist()
    start = len(samples[0].token_ids)
    assert all(changed[start : start + 3])
    assert not any(changed[:start] + changed[start + 3 :])


def test_gradients_of_all_parameters_equal_those_of_the_plain_computation() -> None:
    policy = Policy(make_model("qwen3_moe", dtype=torch.float64))
    samples = make_samples(LENGTHS)
    batch = pack(samples)
    values, _ = policy(batch, keep_routing=False)
    weights = torch.linspace(-1, 1, len(values), dtype=torch.float64)
    (values * weights).sum().backward()
    ours = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    logits = policy.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0]
    # The temperature is a float32 of the sample.
    scaled = logits[batch.predicting] / batch.temperatures.double()[:, None]
    plain = scaled.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(values, plain, rtol=0, atol=1e-10)
    (plain * weights).sum().backward()
    theirs = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-9, msg=name)


def test_entropy_gradients_of_all_parameters_are_those_at_the_sampler_s_temperature() -> None:
    policy = Policy(make_model("qwen3", dtype=torch.float64))
    batch = pack(make_samples(LENGTHS))
    assert not policy(batch)[1].requires_grad
    _, entropies = policy(batch, entropy_gradient=True)
    entropies.sum().backward()
    ours = {name: parameter.grad for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    logits = policy.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0]
    logs = (logits[batch.predicting] / batch.temperatures.double()[:, None]).log_softmax(-1)
    (-(logs.exp() * logs).sum()).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_are_read_where_the_logits_of_each_token_are(dtype: torch.dtype) -> None:
    policy = Policy(make_model("qwen3", dtype=dtype), value_head=True)
    samples = make_samples(LENGTHS, candidates=9)
    batch = pack(samples)
    _, _, values = policy(batch)
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert values.shape == batch.targets.shape
    assert values.abs().max() == 0
    with torch.no_grad():
        policy.value_head.weight.copy_(torch.linspace(-1, 1, 32))
        policy.value_head.bias.fill_(0.25)
        _, _, values = policy(batch)
        for sample, ours in zip(samples, values.split([len(sample.token_ids) for sample in samples]), strict=True):
            ids = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int64))
            hidden = policy.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            before = hidden[len(sample.prompt_token_ids) - 1 : -1].double()
            expected = before @ torch.linspace(-1, 1, 32).double() + 0.25
            torch.testing.assert_close(
                ours.double(), expected, rtol=0, atol=1e-5 if dtype != torch.bfloat16 else 0.2, msg=sample.sample_id
            )


def test_only_a_policy_with_a_value_head_has_its_parameters() -> None:
    without, with_head = Policy(make_model("qwen3")), Policy(make_model("qwen3"), value_head=True)
    ours, theirs = dict(without.named_parameters()), dict(with_head.named_parameters())
    assert theirs.keys() - ours.keys() == {"value_head.weight", "value_head.bias"}
    assert theirs["value_head.weight"].dtype == torch.float32
    assert len(without(pack(make_samples(LENGTHS)))) == 2


def test_the_head_is_the_model_s_own_matrix() -> None:
    for tied in (True, False):
        policy = Policy(make_model("qwen3", tie_word_embeddings=tied))
        assert policy.head.weight is policy.model.get_output_embeddings().weight
        assert (policy.head.weight is policy.model.get_input_embeddings().weight) == tied
        assert len({id(p) for p in policy.parameters()}) == len(list(policy.model.parameters()))


def test_logits_that_the_rule_does_not_explain_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    model.config.final_logit_softcapping = 3.0
    with pytest.raises(InvalidData, match="off by up to") as refused:
        Policy(model)
    assert refused.value.code == "logits_unsupported"


def test_a_model_without_an_output_matrix_is_refused() -> None:
    with pytest.raises(InvalidData, match="Qwen3Model has no base model") as refused:
        Policy(make_model("qwen3").model)
    assert refused.value.code == "model_unsupported"


def test_routing_for_a_dense_model_is_refused() -> None:
    policy = Policy(make_model("qwen3"))
    batch = pack(make_samples(LENGTHS, routing=(2, 8, 2)))
    with pytest.raises(InvalidData, match="expected none for qwen3"):
        policy(batch)


@pytest.fixture(scope="module")
def mixtral_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    make_model("mixtral", attention_dropout=0.3, router_jitter_noise=0.1).save_pretrained(directory)
    return directory


def test_a_loaded_policy_is_deterministic_although_the_model_has_dropout_and_jitter(mixtral_directory: Path) -> None:
    policy = load_policy(str(mixtral_directory), dtype="float32", gradient_checkpointing=True)
    assert policy.training
    assert policy.model.is_gradient_checkpointing
    batch = pack(make_samples(LENGTHS))
    with torch.no_grad():
        first, second = (policy(batch, keep_routing=False)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_bf16_log_probs_are_close_to_float32_ones(mixtral_directory: Path) -> None:
    coarse = load_policy(str(mixtral_directory), dtype="bfloat16")
    fine = load_policy(str(mixtral_directory), dtype="float32")
    batch = pack(make_samples(LENGTHS, routing=(2, 8, 2), candidates=8))
    with torch.no_grad():
        values, expected = coarse(batch)[0], fine(batch)[0]
    assert values.dtype == torch.float32
    assert float((values - expected).abs().mean()) < 0.1
    assert coarse.facts.vocabulary == VOCABULARY
