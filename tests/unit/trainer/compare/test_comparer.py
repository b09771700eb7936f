import math
from dataclasses import replace

import pytest
import torch

from services.common.config import ConfigError
from services.common.errors import InvalidData
from services.common.run_files.recorded_steps import chosen_steps, recorded_step, write_order
from services.trainer.batch.packing import pack
from services.trainer.compare.comparer import compare, cosine
from services.trainer.engine.plain_engine import PlainEngine
from services.trainer.model.policy import Policy
from services.trainer.update.policy_update import PolicyUpdater
from tests.support.trainer.model_families import make_model, make_samples
from tests.support.trainer.plain_engine import update_configuration
from tests.support.trainer.recorded_run import make_order, record_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("compared"), steps=2)


def test_the_engine_keeps_the_gradient_and_changes_nothing():
    policy = Policy(make_model("qwen3", dtype=torch.float32), value_head=True)
    before = {name: value.clone() for name, value in policy.named_parameters()}
    engine = PlainEngine(policy, torch.device("cpu"), steps_applied=7)
    samples = [replace(sample, advantage=0.5) for sample in make_samples([(3, 4), (2, 5)])]
    config = update_configuration(algorithm={"name": "cispo"})
    first = PolicyUpdater(config, engine, None).train(samples)
    gradient = engine.take_gradient()
    assert engine.take_gradient() is None
    second = PolicyUpdater(config, engine, None).train(samples)
    assert first == second
    assert torch.equal(gradient, engine.take_gradient())
    assert engine.steps_applied == 7
    for name, value in policy.named_parameters():
        assert torch.equal(value, before[name])
        assert value.grad is None
    # cispo on a policy of its own: the gradient of the mean log-prob, weighted by the clipped ratio.
    loss = torch.zeros(())
    for sample in samples:
        logprobs, *_ = policy(pack([sample]))
        ratio = torch.exp(logprobs - torch.from_numpy(sample.rollout_logprobs)).clip(0, 5).detach()
        loss = loss - (ratio * 0.5 * logprobs).sum() / 9
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    assert gradient == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert first["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)


def test_the_runs_own_algorithm_gives_the_recorded_gradient(run):
    report = compare(chosen_steps(run, []), ["grpo", "dapo"], [], [])
    assert [step.step for step in report.steps] == [1, 2]
    for index, step in enumerate(report.steps, start=1):
        recorded = recorded_step(run, index).record.metrics
        for name in ("loss", "grad_norm", "clip_fraction"):
            assert step.metrics[0][name] == pytest.approx(float.fromhex(recorded[name]), rel=1e-5, abs=1e-9), name
        assert step.samples == 12
        # They differ in the weight of long answers alone.
        assert 0.5 < step.cosines[0][1] < 1
        assert step.cosines[0][1] == step.cosines[1][0]
        assert [step.cosines[0][0], step.cosines[1][1]] == pytest.approx([1, 1])


def test_all_seven_take_the_same_batch(run):
    names = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "dpo"]
    report = compare(chosen_steps(run, [2]), names, [], [])
    (step,) = report.steps
    assert all(math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0 for metrics in step.metrics)
    assert all(-1 <= value <= 1.000001 for row in step.cosines for value in row)
    by_name = dict(zip(names, step.metrics, strict=True))
    assert by_name["ppo"]["value_loss"] > 0
    assert by_name["dpo"]["preference_pairs"] == 3
    assert report.mean("preference_pairs", names.index("dpo")) == 3
    assert report.mean("preference_pairs", names.index("grpo")) is None


def test_a_separate_critic_leaves_the_policys_gradient_to_the_policy_term(run):
    """Values start at zero either way; on the policy's own trunk the value head, zero too, passes nothing on yet."""
    base = run.parents[1] / "base"
    own = [
        "a.module:critic_ppo:algorithm.critic=separate",
        f"a.module:critic_ppo:algorithm.critic_path={base}",
        "a.module:critic_ppo:algorithm.name=ppo",
    ]
    report = compare(chosen_steps(run, [1]), ["ppo", "a.module:critic_ppo", "grpo"], [], own)
    shared, separate, _ = report.steps[0].metrics
    assert separate["policy_loss"] == pytest.approx(shared["policy_loss"], rel=1e-5)
    assert separate["value_loss"] == pytest.approx(shared["value_loss"], rel=1e-5)
    assert report.steps[0].cosines[0][1] == pytest.approx(1, abs=1e-5)


def test_without_variance_there_is_no_direction(run, tmp_path):
    other = record_run(tmp_path, steps=1)
    write_order(recorded_step(other, 1).path, make_order(1, [1.0] * 4))
    report = compare(chosen_steps(other, []), ["grpo", "dpo"], [], [])
    assert report.steps[0].metrics[1]["preference_pairs"] == 0
    assert report.steps[0].cosines == ((None, None), (None, None))
    assert report.cosine(0, 1) is None


def test_settings_for_one_algorithm(run):
    report = compare(
        chosen_steps(run, [1]),
        ["grpo", "dapo"],
        ["trainer.minibatches=3"],
        ["dapo:algorithm.aggregation=sequence_mean"],
    )
    assert "algorithm.clip_high=null" in report.overrides[1]
    assert report.overrides[1][-1] == "algorithm.aggregation=sequence_mean"
    assert report.steps[0].cosines[0][1] == pytest.approx(1, abs=1e-4)
    with pytest.raises(ConfigError, match="gspo is not among the algorithms"):
        compare(chosen_steps(run, [1]), ["grpo"], [], ["gspo:algorithm.clip_low=0.1"])
    with pytest.raises((ConfigError, ValueError, InvalidData), match="unheard"):
        compare(chosen_steps(run, [1]), ["unheard"], [], [])


def test_cosine():
    axis, other = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 2.0])
    assert cosine(axis, other) == 0
    assert cosine(axis, -axis) == -1
    assert cosine(axis, axis + 1.5 * other) == pytest.approx(2**-0.5)
    assert cosine(axis, torch.zeros(2)) is cosine(None, axis) is cosine(axis, torch.full((2,), torch.inf)) is None
