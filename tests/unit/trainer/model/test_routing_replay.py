"""Every family in the rule table, as a tiny random model of transformers' own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from services.common.errors import InvalidData
from services.trainer.batch.packing import PackedBatch, pack
from services.trainer.model.policy import Policy
from services.trainer.model.probe import probe
from services.trainer.model.routing_replay import RULES, RouterRule, RoutingReplay, find_routers
from tests.support.trainer.model_families import FAMILIES, MOE, make_model, make_samples

LENGTHS = [(4, 5), (3, 6)]
# In these, samples of one row would see each other, or must be alone for another reason.
UNPACKED = {"gpt_oss", "qwen3_next"}


def record(policy: Policy, batch: PackedBatch) -> Tensor:
    """[positions, L, K] native choices, read from the routers themselves."""
    chosen: list[Tensor] = []
    hooks = [
        router.module.register_forward_hook(
            lambda _m, _a, output, rule=router.rule: chosen.append(rule.indices(output))
        )
        for router in find_routers(policy.model)
    ]
    with torch.no_grad():
        policy.model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)


def batch_of(policy: Policy, **settings: Any) -> PackedBatch:
    lengths = LENGTHS if policy.facts.packs else LENGTHS[:1]
    return pack(make_samples(lengths, **settings))


def with_routing(batch: PackedBatch, routing: Tensor | None) -> PackedBatch:
    return PackedBatch(**{**vars(batch), "routing": routing})


def shifted(routing: Tensor, experts: int) -> Tensor:
    """Another valid choice at each position."""
    return (routing + 1) % experts


@pytest.mark.parametrize("family", MOE)
def test_replay_of_a_record_is_bit_equal_and_a_tampered_one_is_not(family: str) -> None:
    policy = Policy(make_model(family))
    facts = policy.facts
    assert facts.packs == (family not in UNPACKED)
    batch = batch_of(policy)
    routing = record(policy, batch)
    assert routing.shape[1:] == (facts.moe_layers, facts.experts_per_token)

    with torch.no_grad():
        native, _ = policy(with_routing(batch, None), keep_routing=False)
        replayed, _ = policy(with_routing(batch, routing))
    assert torch.equal(native, replayed)
    assert policy.agreement is not None
    assert policy.agreement.agreeing == (batch.positions,) * facts.moe_layers
    assert policy.agreement.ratio == 1.0

    tampered = with_routing(batch, shifted(routing, facts.experts))
    with torch.no_grad():
        other, _ = policy(tampered)
        assert policy.agreement.ratio < 1.0
        measured, _ = policy(tampered, keep_routing=False)
    assert float((other - native).abs().max()) > 1e-3
    assert torch.equal(measured, native)


@pytest.mark.parametrize("family", MOE)
def test_gradient_reaches_every_router_through_replayed_experts(family: str) -> None:
    policy = Policy(make_model(family))
    batch = batch_of(policy)
    routing = shifted(record(policy, batch), policy.facts.experts)
    values, _ = policy(with_routing(batch, routing))
    values.sum().backward()
    policy.close_routing()
    routers = find_routers(policy.model)
    assert routers
    for router in routers:
        gradients = [p.grad for p in router.module.parameters() if p.grad is not None]
        assert gradients, router.name
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        if policy.facts.experts_per_token > 1:
            assert any(float(gradient.abs().max()) > 0 for gradient in gradients), router.name


@pytest.mark.parametrize("family", MOE)
def test_a_wrong_rule_is_noticed_at_load(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family)
    (name,) = {type(router.module).__name__ for router in find_routers(model)}
    rule = RULES[name]
    scores = "sigmoid" if rule.scores != "sigmoid" else "softmax"
    wrong = RouterRule(scores, logits_at=rule.logits_at, indices_at=rule.indices_at)
    monkeypatch.setitem(RULES, name, wrong)
    with pytest.raises(InvalidData, match="off by up to") as refused:
        Policy(model)
    assert refused.value.code == "router_rule"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MOE)
def test_rules_are_exact_in_the_family_s_own_precision(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype=dtype)
    policy = Policy(model)
    assert policy.facts.moe_layers > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "granitemoe"])
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = Policy(make_model(family))
        if checkpointing:
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        routed = 0

        def count(*_: Any) -> None:
            nonlocal routed
            routed += 1

        for router in find_routers(policy.model):
            router.module.register_forward_hook(count)
        batch = batch_of(policy)
        routing = shifted(record(policy, batch), policy.facts.experts)
        routed = 0
        values, _ = policy(with_routing(batch, routing))
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
        assert routed == policy.facts.moe_layers * (2 if checkpointing else 1)
        assert policy.agreement is not None
        assert policy.agreement.rows == batch.positions
        policy.close_routing()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=0, msg=name)


def test_a_record_closed_before_a_checkpointed_backward_is_noticed() -> None:
    policy = Policy(make_model("qwen3_moe"))
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = batch_of(policy)
    values, _ = policy(with_routing(batch, shifted(record(policy, batch), policy.facts.experts)))
    policy.close_routing()
    with pytest.raises(CheckpointError):
        values.sum().backward()


@pytest.mark.parametrize("family", ["phimoe", "jetmoe", "dbrx", "llama4_text"])
def test_families_that_cannot_be_replayed_are_refused_by_name(family: str) -> None:
    class Config:
        model_type = family.removesuffix("_text")

    model = nn.Module()
    model.config = Config()  # type: ignore[assignment]
    with pytest.raises(InvalidData, match=f"routing of {Config.model_type} cannot be replayed") as refused:
        find_routers(model)
    assert refused.value.code == "router_unsupported"


def test_group_limited_greedy_is_refused() -> None:
    with pytest.raises(InvalidData, match="group_limited_greedy"):
        Policy(make_model("deepseek_v2", topk_method="group_limited_greedy"))


def test_a_router_without_a_rule_is_refused_unless_routing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "MixtralTopKRouter")
    model = make_model("mixtral")
    with pytest.raises(InvalidData, match="MixtralTopKRouter, for which there is no routing rule"):
        Policy(model)
    policy = Policy(model, keep_routing=False)
    assert policy.facts.moe_layers == 0
    policy(pack(make_samples(LENGTHS)), keep_routing=False)


@pytest.mark.usefixtures("unchecked_signatures")
def test_bad_routing_is_refused_by_name() -> None:
    policy = Policy(make_model("qwen3_moe"))
    batch = batch_of(policy)
    routing = record(policy, batch)
    duplicate, high, negative = routing.clone(), routing.clone(), routing.clone()
    duplicate[3, 1, 1] = duplicate[3, 1, 0]
    high[0, 0, 0], negative[0, 0, 0] = policy.facts.experts, -1
    for bad, code in [
        (None, "routing_missing"),
        (routing[:, :1], "routing_shape"),
        (routing[:, :, :1], "routing_shape"),
        (routing[:-1], "routing_rows"),
        (torch.cat([routing, routing[:1]]), "routing_rows"),
        (duplicate, "routing_duplicate"),
        (high, "expert_out_of_range"),
        (negative, "expert_out_of_range"),
    ]:
        with pytest.raises(InvalidData) as refused:
            policy(with_routing(batch, bad))
        assert refused.value.code == code
        assert policy.routing is not None
        assert not policy.routing.is_open


def test_a_layer_that_does_not_route_is_noticed() -> None:
    model = make_model("qwen3_moe")
    routers = find_routers(model)
    replay = RoutingReplay(routers, experts=8, experts_per_token=2)
    with replay.replaying(torch.tensor([[[0, 1], [2, 3]]] * 4), override=True):
        routers[1].module(torch.randn(4, 32))
        with pytest.raises(InvalidData, match=r"MoE layers \[0\] did not route"):
            replay.agreement()
    assert not replay.is_open


def test_layers_are_told_apart_by_position_and_not_by_order_of_calls() -> None:
    routers = find_routers(make_model("qwen3_moe"))
    replay = RoutingReplay(routers, experts=8, experts_per_token=2)
    routing = torch.tensor([[[0, 1], [2, 3]]] * 4)
    with replay.replaying(routing, override=True):
        hidden = torch.randn(4, 32)
        for layer in (1, 0, 1):
            assert torch.equal(routers[layer].module(hidden)[2], routing[:, layer])


def test_a_second_replay_is_refused_while_one_is_open() -> None:
    policy = Policy(make_model("qwen3_moe"))
    batch = batch_of(policy)
    routing = record(policy, batch)
    policy(with_routing(batch, routing))
    with pytest.raises(RuntimeError, match="already open"):
        policy(with_routing(batch, routing))
    policy.close_routing()


def test_a_model_with_routers_that_differ_is_refused() -> None:
    model = make_model("qwen3_moe")
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(InvalidData, match=r"\[2, 3\] a token"):
        Policy(model)


def test_families_cover_the_promised_ones() -> None:
    promised = "qwen3_moe qwen2_moe mixtral olmoe deepseek_v3 glm4_moe gpt_oss granitemoe minimax"
    assert set(promised.split()) <= FAMILIES.keys()


def test_the_probe_leaves_no_hook_and_no_mode_behind() -> None:
    model = make_model("qwen3_moe")
    from services.trainer.model.logprobs import LogitRule

    probe(model, find_routers(model), LogitRule())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
