"""DPO through the whole update, against plain PyTorch written out answer by answer."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from services.common.errors import InvalidData
from services.trainer.batch.pairs import pairs_of
from services.trainer.model.policy import Policy
from services.trainer.update.algorithm import configured_algorithm, needs_reference
from services.trainer.update.open import open_updater
from services.trainer.update.preference_update import PreferenceUpdater
from services.trainer.update.reference import Reference
from tests.support.trainer.model_families import make_model, make_samples
from tests.support.trainer.plain_engine import DescentEngine, update_configuration

BETA, SMOOTHING = 0.3, 0.1
LENGTHS = [(4, 5), (4, 3), (4, 2), (2, 3), (2, 6), (3, 2), (3, 4)]
GROUPS = ["a", "a", "a", "b", "b", "c", "c"]
REWARDS = [0.5, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
PAIRS = [(1, 2), (4, 3)]


def make_policy(family="qwen3"):
    return Policy(make_model(family, dtype=torch.float64)).to(torch.float64)


def scored_samples(**recorded):
    return [
        replace(sample, group_id=group, reward=reward)
        for sample, group, reward in zip(make_samples(LENGTHS, **recorded), GROUPS, REWARDS, strict=True)
    ]


def configuration(**sections):
    algorithm = {"name": "dpo", "beta": BETA, "label_smoothing": SMOOTHING}
    return update_configuration(algorithm=algorithm, **sections)


def other_reference(policy):
    """Frozen, and not the policy itself: its first layer is a little off."""
    frozen = deepcopy(policy)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in frozen.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return Reference(frozen, torch.device("cpu"))


def answer_logprob(policy, sample):
    """From the model's own full logits, one answer by itself, over its recorded candidates."""
    tokens = torch.from_numpy(sample.token_ids).long()
    row = torch.cat([torch.from_numpy(sample.prompt_token_ids).long(), tokens])[None]
    logits = policy.model(input_ids=row, use_cache=False).logits[0, len(sample.prompt_token_ids) - 1 : -1]
    logits = logits / torch.tensor(sample.temperature, dtype=torch.float32).double()
    total = logits.new_zeros(())
    start = 0
    for position, token in enumerate(tokens):
        kept = logits[position]
        if sample.replay.candidates is not None:
            count = sample.replay.candidates.counts[position]
            ids = torch.from_numpy(sample.replay.candidates.token_ids[start : start + count]).long()
            kept, start = kept[ids], start + count
        total = total + logits[position, token] - kept.logsumexp(0)
    return total


def plain_loss(policy, reference, samples):
    losses = []
    for chosen, rejected in PAIRS:
        margin = BETA * sum(
            sign * (answer_logprob(policy, samples[index]) - answer_logprob(reference, samples[index]).detach())
            for sign, index in ((1, chosen), (-1, rejected))
        )
        losses.append(-(1 - SMOOTHING) * logsigmoid(margin) - SMOOTHING * logsigmoid(-margin))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("budget", "forwards"), [(16, 2), (64, 1)])
@pytest.mark.parametrize("candidates", [None, 9])
def test_the_gradient_is_that_of_the_pairs_written_out(budget, forwards, candidates):
    policy = make_policy()
    samples = scored_samples(candidates=candidates)
    reference = other_reference(policy)
    engine = DescentEngine(policy)
    config = configuration(
        trainer={"tokens_per_microbatch": budget},
        model={"max_length": 8},
        data={"max_prompt_tokens": 4},
        sampling={"max_tokens": 4},
    )
    values = PreferenceUpdater(config, engine, reference).train(samples)
    loss = plain_loss(policy, reference._policy, samples)
    loss.backward()
    assert values["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert values["preference_pairs"] == 2
    assert engine.forwards == forwards
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(engine.gradients[name], parameter.grad, rtol=1e-6, atol=1e-9)


def test_a_small_budget_splits_between_pairs_only():
    engine = DescentEngine(make_policy())
    samples = scored_samples()
    config = configuration(trainer={"tokens_per_microbatch": 32}, model={"max_length": 16})
    PreferenceUpdater(config, engine, other_reference(engine.policy)).train([*samples, *renamed(samples)])
    assert engine.forwards > 1


def renamed(samples):
    return [replace(each, sample_id=f"{each.sample_id}-b", group_id=f"{each.group_id}-b") for each in samples]


def test_routing_and_candidates_reach_policy_and_reference_alike():
    policy = make_policy("qwen3_moe")
    facts = policy.facts
    samples = scored_samples(routing=(facts.moe_layers, facts.experts, facts.experts_per_token), candidates=9)
    engine = DescentEngine(policy)
    # A copy would route through the hooks of the original.
    reference = Reference(make_policy("qwen3_moe"), torch.device("cpu"))
    values = PreferenceUpdater(configuration(), engine, reference).train(samples)
    assert values["preference_margin"] == 0
    assert values["preference_accuracy"] == 0.5
    assert 0 < values["routing_agreement"] < 1
    assert values["candidate_set_size"] > 1


def test_groups_without_variance_give_no_step():
    engine = DescentEngine(make_policy())
    samples = [replace(sample, reward=1.0) for sample in scored_samples()]
    values = PreferenceUpdater(configuration(), engine, other_reference(engine.policy)).train(samples)
    assert (values["preference_pairs"], values["step_applied"], engine.forwards) == (0, 0, 0)


def test_epochs_and_minibatches_each_take_a_step():
    engine = DescentEngine(make_policy(), rate=0.01)
    config = configuration(trainer={"epochs": 2, "minibatches": 2, "groups_per_step": 2})
    PreferenceUpdater(config, engine, other_reference(engine.policy)).train(scored_samples())
    assert engine.steps_applied == 4


def test_learning_moves_held_out_pairs_ahead():
    engine = DescentEngine(make_policy(), rate=0.05)
    samples = scored_samples()
    updater = PreferenceUpdater(configuration(), engine, Reference(deepcopy(engine.policy), torch.device("cpu")))
    before = updater.evaluate(samples)
    for _ in range(5):
        updater.train(samples)
    after = updater.evaluate(samples)
    assert before["preference_accuracy"] == 0.5
    assert before["preference_margin"] == 0
    assert after["preference_accuracy"] == 1
    assert after["preference_margin"] > 0
    assert after["preference_loss"] < before["preference_loss"]


def test_pairs_are_best_against_worst():
    samples = scored_samples()
    chosen = [(samples.index(pair.chosen), samples.index(pair.rejected)) for pair in pairs_of(samples)]
    assert chosen == PAIRS


def test_the_updater_follows_the_algorithm():
    engine = DescentEngine(make_policy())
    assert isinstance(open_updater(configuration(), engine, other_reference(engine.policy)), PreferenceUpdater)
    with pytest.raises(ValueError, match="reference is missing, expected one: dpo holds on to it"):
        open_updater(configuration(), engine, None)
    assert needs_reference(configuration())


def test_a_model_that_does_not_pack_is_refused():
    engine = DescentEngine(make_policy())
    engine.policy.facts = replace(engine.policy.facts, packs=False)
    with pytest.raises(InvalidData, match="both answers of a pair go into one micro-batch"):
        PreferenceUpdater(configuration(), engine, other_reference(engine.policy))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "dpo", "clip_high": 0.3}, "algorithm.clip_high is 0.3, expected none: dpo learns from preferences"),
        ({"name": "grpo", "beta": 0.2}, "algorithm.beta is 0.2, expected none: grpo learns from rewards"),
        ({"name": "grpo", "critic": "separate"}, "algorithm.critic is separate, expected shared: grpo has no value"),
    ],
)
def test_settings_of_the_other_kind_are_refused(algorithm, message):
    with pytest.raises(ValueError, match=message):
        configured_algorithm(update_configuration(algorithm=algorithm))
