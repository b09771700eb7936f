"""PPO and the entropy bonus through the whole update, against plain PyTorch written out sample by sample."""

from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.batch.packing import pack
from services.trainer.batch.samples import TrainSample
from services.trainer.model.policy import Policy
from services.trainer.update.policy_update import PolicyUpdater
from tests.support.trainer.model_families import make_model, make_samples
from tests.support.trainer.plain_engine import DescentEngine, update_configuration

LENGTHS = [(4, 5), (2, 3)]
REWARDS = [1.0, -0.5]
GAMMA, LAMBDA, VALUE_COEF, VALUE_CLIP, ENTROPY_COEF, CLIP = 0.97, 0.9, 0.7, 0.1, 0.05, 0.1
RATE = 0.02
PPO = {
    "name": "ppo",
    "gamma": GAMMA,
    "gae_lambda": LAMBDA,
    "value_coef": VALUE_COEF,
    "value_clip": VALUE_CLIP,
    "entropy_coef": ENTROPY_COEF,
    "clip_low": CLIP,
    "clip_high": CLIP,
}


def make_policy(dtype: torch.dtype = torch.float64, *, value_head: bool = True) -> Policy:
    """With a value head that has already learned something."""
    policy = Policy(make_model("qwen3", dtype=dtype), value_head=value_head).to(dtype)
    if policy.value_head is not None:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            policy.value_head.weight.copy_(0.05 * torch.randn(1, 32, generator=generator))
            policy.value_head.bias.fill_(0.1)
    return policy


def scored_samples(policy: Policy, lengths: list[tuple[int, int]] = LENGTHS) -> list[TrainSample]:
    """Sampled by a policy about 0.1 nats away, from candidate sets; `advantage` is left at something absurd."""
    samples = make_samples(lengths, candidates=9)
    noise = np.random.default_rng(7)
    rewards = [REWARDS[index % 2] for index in range(len(samples))]
    scored = []
    for sample, reward in zip(samples, rewards, strict=True):
        with torch.no_grad():
            logprobs = policy(pack([sample]))[0].numpy()
        sampled = (logprobs + noise.normal(0, 0.1, len(logprobs))).astype(np.float32)
        scored.append(replace(sample, rollout_logprobs=sampled, reward=reward, advantage=1e6))
    return scored


@dataclass
class Plain:
    """One sample under full logits."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor


def look(policy: Policy, sample: TrainSample) -> Plain:
    ids = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.token_ids]).astype(np.int64))
    hidden = policy.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    hidden = hidden[len(sample.prompt_token_ids) - 1 : -1]
    # The temperature is a float32 of the sample.
    scaled = policy.model.get_output_embeddings()(hidden) / float(np.float32(sample.temperature))
    assert sample.replay.candidates is not None
    sets = np.split(sample.replay.candidates.token_ids, np.cumsum(sample.replay.candidates.counts)[:-1])
    logprobs, entropies = [], []
    for row, candidates, token in zip(scaled, sets, sample.token_ids, strict=True):
        logs = row[torch.from_numpy(candidates.astype(np.int64))].log_softmax(0)
        logprobs.append(logs[int((candidates == token).nonzero()[0][0])])
        entropies.append(-(logs.exp() * logs).sum())
    assert policy.value_head is not None
    values = hidden @ policy.value_head.weight[0] + policy.value_head.bias
    return Plain(torch.stack(logprobs), torch.stack(entropies), values)


def advantages_of(values: list[float], reward: float) -> list[float]:
    """Backwards, as in the paper."""
    found, following, value_after = [], 0.0, 0.0
    for position in reversed(range(len(values))):
        paid = reward if position == len(values) - 1 else 0.0
        following = paid + GAMMA * value_after - values[position] + GAMMA * LAMBDA * following
        value_after = values[position]
        found.append(following)
    return found[::-1]


def plain_ppo(policy: Policy, samples: list[TrainSample], epochs: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Terms, mean over `epochs` steps of gradient descent, and gradients of the last one; moves `policy`."""
    tokens = sum(len(sample.token_ids) for sample in samples)
    with torch.no_grad():
        old_values = [look(policy, sample).values for sample in samples]
    advantages = [
        torch.tensor(advantages_of(values.tolist(), sample.reward), dtype=torch.float64)
        for values, sample in zip(old_values, samples, strict=True)
    ]
    reported = []
    for _ in range(epochs):
        policy_loss = value_loss = entropy_loss = torch.zeros((), dtype=torch.float64)
        for sample, old, advantage in zip(samples, old_values, advantages, strict=True):
            now = look(policy, sample)
            ratio = (now.logprobs - torch.from_numpy(sample.rollout_logprobs).double()).exp()
            policy_loss = policy_loss - torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()
            target = advantage + old
            near = old + (now.values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
            value_loss = value_loss + 0.5 * torch.max((now.values - target) ** 2, (near - target) ** 2).sum()
            entropy_loss = entropy_loss - now.entropies.sum()
        terms = {
            "policy_loss": policy_loss / tokens,
            "value_loss": VALUE_COEF * value_loss / tokens,
            "entropy_loss": ENTROPY_COEF * entropy_loss / tokens,
        }
        reported.append({name: term.item() for name, term in terms.items()})
        policy.zero_grad()
        sum(terms.values()).backward()  # type: ignore[union-attr]
        gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.sub_(RATE * gradients[name])
    return {name: sum(each[name] for each in reported) / epochs for name in terms}, gradients


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_step_is_that_of_plain_pytorch(epochs: int) -> None:
    policy = make_policy()
    samples = scored_samples(policy)
    terms, gradients = plain_ppo(deepcopy(policy), samples, epochs)
    engine = DescentEngine(policy, RATE)
    config = update_configuration(algorithm=PPO, trainer={"epochs": epochs})
    found = PolicyUpdater(config, engine, None).train(samples)
    # What comes from the sampler is float32.
    assert {name: found[name] for name in terms} == pytest.approx(terms, rel=1e-6)
    assert found["loss"] == pytest.approx(sum(terms.values()), rel=1e-6)
    assert engine.gradients.keys() == gradients.keys() >= {"value_head.weight", "value_head.bias"}
    for name, gradient in gradients.items():
        torch.testing.assert_close(engine.gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    assert 0 < found["clip_fraction"] < 1
    # In the first epoch values have not moved; in the second some have moved too far.
    assert (0 < found["value_clip_fraction"] < 1) if epochs == 2 else found["value_clip_fraction"] == 0


def test_how_samples_are_packed_does_not_matter() -> None:
    results = []
    for budget in (64, 16):
        policy = make_policy()
        samples = scored_samples(policy, [(4, 5), (2, 3), (6, 2), (1, 7)])
        engine = DescentEngine(policy, RATE)
        found = PolicyUpdater(
            update_configuration(algorithm=PPO, trainer={"tokens_per_microbatch": budget}), engine, None
        )
        results.append((found.train(samples), engine.gradients, engine.forwards))
    (one, ours, one_forward), (several, theirs, more_forwards) = results
    assert one_forward == 1
    assert more_forwards >= 2
    assert several == pytest.approx(one, rel=1e-6)
    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_the_old_policy_is_measured_once_whatever_the_epochs() -> None:
    policy = make_policy(torch.float32)
    engine = DescentEngine(policy, RATE)
    algorithm = {**PPO, "old_policy": "recomputed"}
    found = PolicyUpdater(
        update_configuration(algorithm=algorithm, trainer={"epochs": 3, "minibatches": 2}), engine, None
    )
    values = found.train(scored_samples(policy, [(4, 5), (2, 3), (6, 2), (1, 7)]))
    # Two mini-batches before the first step, and each of the six steps as it begins.
    assert (engine.measurements, engine.forwards, engine.steps_applied) == (2 + 6, 6, 6)
    assert values["first_policy_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert values["policy_ratio_min"] < 0.99
    assert values["policy_ratio_max"] > 1.01


def test_the_sequence_mask_goes_by_what_the_value_head_thinks() -> None:
    policy = make_policy()
    samples = scored_samples(policy)
    assert all(sample.advantage > 0 for sample in samples)
    samples = [replace(sample, rollout_logprobs=sample.rollout_logprobs + np.float32(0.5)) for sample in samples]
    config = update_configuration(
        algorithm=PPO, rl_stability={"sequence_masking": {"enabled": True, "min_keep_ratio": 0.0}}
    )
    for rewards, masked in [((5.0, -5.0), 0.5), ((-5.0, -5.0), 1.0), ((5.0, 5.0), 0.0)]:
        scored = [replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True)]
        assert PolicyUpdater(config, DescentEngine(policy), None).train(scored)["masked_fraction"] == masked


@pytest.mark.parametrize("candidates", [None, 9], ids=["whole vocabulary", "candidates"])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_entropy_bonus_raises_entropy_and_its_absence_does_not(name: str, candidates: int | None) -> None:
    raised, expected = [], []
    for coef in (0.0, 1.0):
        policy = make_policy(value_head=name == "ppo")
        if policy.value_head is not None:
            torch.nn.init.zeros_(policy.value_head.weight)
            torch.nn.init.zeros_(policy.value_head.bias)
        # Nothing to learn: neither advantages nor, with values of 0, rewards.
        samples = [replace(sample, advantage=0.0) for sample in make_samples(LENGTHS, candidates=candidates)]
        batch = pack(samples)
        before = policy(batch)[1].mean().item()
        config = update_configuration(algorithm={"name": name, "entropy_coef": coef, "aggregation": "token_mean"})
        values = PolicyUpdater(config, DescentEngine(policy, 1e-4), None).train(samples)
        # Gradient descent on −entropy: to first order it rises by rate · |gradient|².
        expected.append(1e-4 * values["grad_norm"] ** 2)
        raised.append(policy(batch)[1].mean().item() - before)
        assert values["entropy"] == pytest.approx(before)
        assert values.get("entropy_loss", 0.0) == pytest.approx(-coef * before)
    assert raised[0] == 0
    assert raised[1] > 1e-6
    assert raised[1] == pytest.approx(expected[1], rel=0.05)


def test_values_approach_the_return() -> None:
    policy = Policy(make_model("qwen3"), value_head=True)
    samples = [replace(sample, reward=1.0) for sample in scored_samples_of(policy)]
    updater = PolicyUpdater(
        update_configuration(algorithm={"name": "ppo", "value_clip": 0.0}), DescentEngine(policy, 0.1), None
    )
    losses = [updater.train(samples) for _ in range(20)]
    assert losses[0]["value"] == 0
    assert losses[0]["return"] == pytest.approx(np.mean(np.concatenate([0.95 ** np.arange(n)[::-1] for n in (5, 3)])))
    assert losses[-1]["value_loss"] < 0.2 * losses[0]["value_loss"]


def scored_samples_of(policy: Policy) -> list[TrainSample]:
    samples = make_samples(LENGTHS)
    with torch.no_grad():
        return [replace(sample, rollout_logprobs=policy(pack([sample]))[0].numpy()) for sample in samples]


def test_ppo_without_a_value_head_is_refused() -> None:
    policy = make_policy(value_head=False)
    with pytest.raises(ValueError, match="advantages is missing, expected"):
        PolicyUpdater(update_configuration(algorithm=PPO), DescentEngine(policy), None).train(scored_samples(policy))
