from dataclasses import replace

import pytest
import torch

from services.common.errors import InvalidData
from services.trainer.batch.packing import pack
from services.trainer.engine.optimizer import build_optimizer, parameter_groups, set_learning_rates
from services.trainer.model.critic import Critic, load_critic
from services.trainer.model.policy import Policy, load_policy
from services.trainer.update.policy_update import PolicyUpdater
from tests.support.trainer.model_families import make_model, make_samples
from tests.support.trainer.plain_engine import DescentEngine, update_configuration

LENGTHS = [(4, 5), (2, 3)]


@pytest.fixture
def policy():
    return Policy(make_model("qwen3"), critic=Critic(make_model("qwen3")))


@pytest.fixture
def saved(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def teach(head):
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, head.weight.numel())[None])
        head.bias.fill_(0.25)


def test_it_values_tokens_as_a_value_head_on_the_same_trunk_would(policy):
    shared = Policy(make_model("qwen3"), value_head=True)
    teach(shared.value_head)
    teach(policy.critic.value_head)
    batch = pack(make_samples(LENGTHS))
    torch.testing.assert_close(policy(batch)[2], shared(batch)[2], rtol=0, atol=0)
    assert policy.value_head is None


def test_neither_loss_reaches_the_other_trunk(policy):
    teach(policy.critic.value_head)
    batch = pack(make_samples(LENGTHS))
    for index, theirs in ((0, "model."), (2, "critic.")):
        policy.zero_grad()
        policy(batch)[index].sum().backward()
        touched = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert touched
        assert all(name.startswith(theirs) for name in touched)


def test_ppo_trains_it(policy):
    samples = [replace(sample, reward=1.0) for sample in make_samples(LENGTHS)]
    config = update_configuration(algorithm={"name": "ppo", "value_clip": 0.0, "critic": "separate"})
    updater = PolicyUpdater(config, DescentEngine(policy, 0.1), None)
    losses = [updater.train(samples)["value_loss"] for _ in range(20)]
    assert losses[-1] < 0.2 * losses[0]


def test_an_moe_critic_routes_by_itself():
    policy = Policy(make_model("qwen3_moe"), critic=Critic(make_model("qwen3_moe")))
    teach(policy.critic.value_head)
    facts = policy.facts
    routing = (facts.moe_layers, facts.experts, facts.experts_per_token)
    one, other = (pack(make_samples(LENGTHS, routing=routing, seed=3)) for _ in range(2))
    other = replace(other, routing=(one.routing + 1) % facts.experts)
    with torch.no_grad():
        assert torch.equal(policy(one)[2], policy(other)[2])
        assert not torch.equal(policy(one)[0], policy(other)[0])


def test_gradient_checkpointing_does_not_change_an_moe_critics_gradients():
    found = []
    for checkpointing in (False, True):
        models = [make_model("qwen3_moe") for _ in range(2)]
        for model in models:
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = Policy(models[0], critic=Critic(models[1]))
        teach(policy.critic.value_head)
        facts = policy.facts
        batch = pack(make_samples(LENGTHS, routing=(facts.moe_layers, facts.experts, facts.experts_per_token)))
        logprobs, _, values = policy(batch)
        # The policy's record is still open: the critic's second forward must not see it.
        (logprobs.sum() + values.square().sum()).backward()
        policy.close_routing()
        found.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    plain, checkpointed = found
    assert plain.keys() == checkpointed.keys()
    assert any(name.startswith("critic.trunk") and "gate" in name for name in plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=0, atol=1e-6, msg=name)


def test_it_is_read_from_a_directory_of_its_own(saved):
    policy = load_policy(saved, dtype="float32", critic_path=saved, gradient_checkpointing=True)
    batch = pack(make_samples(LENGTHS))
    assert policy(batch)[2].abs().max() == 0
    assert {name.split(".")[0] for name, _ in policy.named_parameters()} == {"model", "critic"}
    assert not any("lm_head" in name for name, _ in policy.critic.named_parameters())


def test_one_that_cannot_read_the_policys_tokens_is_refused(saved):
    with pytest.raises(InvalidData, match="has a vocabulary of .*, expected at least the policy's 100000"):
        load_critic(saved, dtype="float32", gradient_checkpointing=False, vocabulary=100_000, packs=True)


def test_one_that_mixes_packed_samples_is_refused(tmp_path):
    make_model("gpt_oss").save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidData, match="mixes packed samples, expected a critic that keeps them apart"):
        load_critic(str(tmp_path / "model"), dtype="float32", gradient_checkpointing=False, vocabulary=10, packs=True)


def test_it_learns_at_a_rate_of_its_own(policy):
    config = update_configuration(
        algorithm={"name": "ppo", "critic": "separate", "critic_learning_rate": 1e-2},
        trainer={"optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.1}},
    )
    groups = parameter_groups(policy, config)
    assert [group.peak for group in groups] == [1e-3, 1e-3, 1e-2, 1e-2]
    assert [group.weight_decay for group in groups] == [0.1, 0, 0.1, 0]
    critic = {id(parameter) for parameter in policy.critic.parameters()}
    assert {id(p) for group in groups[2:] for p in group.parameters} == critic
    assert sum(len(group.parameters) for group in groups) == len(list(policy.parameters()))
    optimizer = build_optimizer(groups, config)
    peaks = [group.peak for group in groups]
    assert set_learning_rates(optimizer.param_groups, peaks, config, 0, 10) == 5e-4
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-4, 5e-3, 5e-3]


def test_without_a_rate_it_learns_at_the_policys(policy):
    groups = parameter_groups(policy, update_configuration(algorithm={"name": "ppo", "critic": "separate"}))
    assert len({group.peak for group in groups}) == 1
