"""A number that is not finite anywhere in a step: it changes nothing, names its samples, and the next step trains."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from services.trainer.model.policy import Policy
from services.trainer.update.non_finite import Skipped
from services.trainer.update.policy_update import PolicyUpdater
from services.trainer.update.preference_update import PreferenceUpdater
from services.trainer.update.reference import Reference
from tests.support.trainer.model_families import make_model, make_samples
from tests.support.trainer.plain_engine import DescentEngine, update_configuration

LENGTHS = [(4, 5), (2, 3), (6, 2), (1, 7)]
BAD = "sample-2"


class PoisonedEngine(DescentEngine):
    """Makes one number of the bad sample not finite, of a `field` and in one kind of forward, as long as `on`."""

    def __init__(self, policy, field, *, gradient, value=math.nan):
        super().__init__(policy, 0.05)
        self.field, self.gradient, self.value, self.on = field, gradient, value, True

    def _output(self, batch, **options):
        output = super()._output(batch, **options)
        if not self.on or BAD not in batch.sample_ids or torch.is_grad_enabled() is not self.gradient:
            return output
        bad = batch.sequence_ids == batch.sample_ids.index(BAD)
        return replace(output, **{self.field: getattr(output, self.field).where(~bad, self.value)})


def samples():
    return [
        replace(sample, reward=float(index % 2), group_id=str(index // 2))
        for index, sample in enumerate(make_samples(LENGTHS, candidates=9))
    ]


def state(engine):
    return [parameter.detach().clone() for parameter in engine.policy.parameters()]


def unchanged(before, engine):
    return all(torch.equal(old, new) for old, new in zip(before, engine.policy.parameters(), strict=True))


@pytest.mark.parametrize("budget", [64, 16], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("gradient", [False, True], ids=["measuring", "training"])
@pytest.mark.parametrize(
    ("algorithm", "field"),
    [
        ({"name": "grpo"}, "logprobs"),
        ({"name": "grpo", "old_policy": "recomputed"}, "logprobs"),
        ({"name": "grpo", "entropy_coef": 0.1}, "entropies"),
        ({"name": "ppo"}, "values"),
        ({"name": "ppo", "entropy_coef": 0.1}, "logprobs"),
    ],
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each.values())),
)
def test_a_number_of_the_forward_makes_it_a_skipped_step(algorithm, field, gradient, budget):
    policy = Policy(make_model("qwen3"), value_head=algorithm["name"] == "ppo")
    engine = PoisonedEngine(policy, field, gradient=gradient)
    updater = PolicyUpdater(
        update_configuration(algorithm=algorithm, trainer={"tokens_per_microbatch": budget}), engine, None
    )
    before = state(engine)
    values = updater.train(samples())
    assert updater.skipped == [Skipped("forward", (BAD,))]
    assert values["step_applied"] == 0
    assert math.isnan(values["loss"])
    assert unchanged(before, engine)
    assert engine.steps_applied == 0
    engine.on = False
    values = updater.train(samples())
    assert updater.skipped == []
    assert values["step_applied"] == engine.steps_applied == 1
    assert math.isfinite(values["loss"])
    assert not unchanged(before, engine)


def test_a_reference_that_is_not_finite_makes_it_a_skipped_step():
    engine = DescentEngine(Policy(make_model("qwen3")), 0.05)

    class Broken(Reference):
        def logprobs(self, batch, *, keep_routing):
            found = super().logprobs(batch, keep_routing=keep_routing)
            bad = [index for index, sample_id in enumerate(batch.sample_ids) if sample_id == BAD]
            return found.where(batch.sequence_ids != (bad[0] if bad else -1), math.inf)

    reference = Broken(Policy(make_model("qwen3")), torch.device("cpu"))
    config = update_configuration(rl_stability={"unbiased_kl": {"enabled": True, "coef": 0.1}})
    updater = PolicyUpdater(config, engine, reference)
    assert updater.train(samples())["step_applied"] == 0
    assert updater.skipped == [Skipped("forward", (BAD,))]


def test_a_loss_that_is_too_large_makes_it_a_skipped_step():
    """Finite log-probs whose ratio, on the unclipped side, is more than float32 can hold in truth too."""
    engine = DescentEngine(Policy(make_model("qwen3")), 0.05)
    far = [
        replace(
            sample,
            advantage=-1.0,
            rollout_logprobs=sample.rollout_logprobs - (500 if sample.sample_id == BAD else 0),
        )
        for sample in samples()
    ]
    updater = PolicyUpdater(update_configuration(trainer={"tokens_per_microbatch": 16}), engine, None)
    before = state(engine)
    values = updater.train(far)
    assert values["step_applied"] == 0
    (skipped,) = updater.skipped
    assert skipped.reason == "loss"
    assert BAD in skipped.samples
    assert len(skipped.samples) < len(far)
    assert unchanged(before, engine)


def test_a_gradient_that_is_not_finite_is_all_samples_fault():
    class Overflowing(DescentEngine):
        def backward(self, loss, *, last):
            super().backward(loss * 1e38 * 1e38, last=last)

    engine = Overflowing(Policy(make_model("qwen3")), 0.05)
    updater = PolicyUpdater(update_configuration(), engine, None)
    assert updater.train(samples())["step_applied"] == 0
    assert updater.skipped == [Skipped("gradient", tuple(sample.sample_id for sample in samples()))]


def test_the_other_minibatches_train():
    engine = PoisonedEngine(Policy(make_model("qwen3")), "logprobs", gradient=True)
    config = update_configuration(trainer={"minibatches": 2, "epochs": 2})
    updater = PolicyUpdater(config, engine, None)
    values = updater.train(samples())
    assert values["step_applied"] == 0.5
    assert engine.steps_applied == 2
    assert updater.skipped == [Skipped("forward", (BAD,))] * 2
    assert math.isfinite(values["loss"])
    assert math.isfinite(values["grad_norm"])


@pytest.mark.parametrize("budget", [64, 16], ids=["one micro-batch", "several"])
@pytest.mark.parametrize(
    ("reward", "value"),
    [(1e39, 0.0), (3e38, -3e38), (3e38, 0.0)],
    ids=["reward beyond float32", "advantage beyond it", "squared error beyond it"],
)
def test_returns_that_no_number_of_the_trainer_holds(reward, value, budget):
    engine = PoisonedEngine(Policy(make_model("qwen3"), value_head=True), "values", gradient=False, value=value)
    config = update_configuration(algorithm={"name": "ppo"}, trainer={"tokens_per_microbatch": budget})
    updater, before = PolicyUpdater(config, engine, None), state(engine)
    huge = [replace(sample, reward=reward if sample.sample_id == BAD else sample.reward) for sample in samples()]
    values = updater.train(huge)
    assert values["step_applied"] == 0
    (skipped,) = updater.skipped
    assert BAD in skipped.samples
    assert (skipped.samples == (BAD,)) is (skipped.reason == "forward") is (abs(reward - value) > 3.4e38)
    assert unchanged(before, engine)
    engine.on = False
    assert updater.train(samples())["step_applied"] == 1


@pytest.mark.parametrize("gap", [1e39, -1e39, math.inf, math.nan])
def test_an_advantage_that_float32_does_not_hold(gap):
    engine = DescentEngine(Policy(make_model("qwen3")), 0.05)
    updater = PolicyUpdater(update_configuration(trainer={"tokens_per_microbatch": 16}), engine, None)
    values = updater.train([replace(sample, advantage=gap if sample.sample_id == BAD else 1.0) for sample in samples()])
    assert (values["step_applied"], updater.skipped) == (0, [Skipped("forward", (BAD,))])
    assert engine.forwards == 0


@pytest.mark.parametrize("value", [-3e38, 3e38])
@pytest.mark.parametrize("beta", [0.1, 1e30])
def test_log_probs_of_an_answer_whose_sum_float32_does_not_hold(value, beta):
    engine = PoisonedEngine(Policy(make_model("qwen3")), "logprobs", gradient=True, value=value)
    reference = Reference(deepcopy(engine.policy), torch.device("cpu"))
    config = update_configuration(algorithm={"name": "dpo", "beta": beta})
    updater = PreferenceUpdater(config, engine, reference)
    assert updater.train(samples())["step_applied"] == 0
    assert updater.skipped == [Skipped("forward", (BAD,))]


def test_a_margin_that_float32_does_not_hold():
    engine = DescentEngine(Policy(make_model("qwen3")), 0.05)
    reference = Reference(Policy(make_model("qwen3")), torch.device("cpu"))
    with torch.no_grad():
        for parameter in reference._policy.parameters():
            parameter.add_(0.1)
    config = update_configuration(algorithm={"name": "dpo", "beta": 1e38})
    updater = PreferenceUpdater(config, engine, reference)
    assert updater.train(samples())["step_applied"] == 0
    assert [skipped.reason for skipped in updater.skipped] == ["loss"]


@pytest.mark.parametrize("budget", [64, 16], ids=["one micro-batch", "several"])
def test_pairs_of_answers_alike(budget):
    engine = PoisonedEngine(Policy(make_model("qwen3")), "logprobs", gradient=True)
    reference = Reference(deepcopy(engine.policy), torch.device("cpu"))
    config = update_configuration(
        algorithm={"name": "dpo"},
        model={"max_length": 8},
        data={"max_prompt_tokens": 4},
        sampling={"max_tokens": 4},
        trainer={"tokens_per_microbatch": budget},
    )
    updater = PreferenceUpdater(config, engine, reference)
    before = state(engine)
    values = updater.train(samples())
    assert updater.skipped == [Skipped("forward", (BAD,))]
    assert (values["step_applied"], values["preference_pairs"]) == (0, 2)
    assert unchanged(before, engine)
    engine.on = False
    assert updater.train(samples())["step_applied"] == 1
    assert updater.skipped == []


def test_held_out_pairs_that_are_not_finite_have_no_accuracy():
    engine = PoisonedEngine(Policy(make_model("qwen3")), "logprobs", gradient=False)
    reference = Reference(deepcopy(engine.policy), torch.device("cpu"))
    found = PreferenceUpdater(update_configuration(algorithm={"name": "dpo"}), engine, reference).evaluate(samples())
    assert all(math.isnan(value) for value in found.values())
    assert found.keys() >= {"preference_accuracy", "preference_accuracy_error", "preference_loss"}
