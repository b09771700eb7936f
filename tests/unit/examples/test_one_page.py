"""The one page against the system: the same samples give the same loss and gradient."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trivet.v1 import sample_pb2, step_pb2

from examples import one_page
from examples.one_page import GROUP_SIZE, GROUPS, SAMPLING, Learner, engine_config, loss_and_gradients, training_samples
from examples.quickstart.model import build_model
from examples.quickstart.task import draw_split, write_jsonl
from examples.quickstart.tokenizer import build_tokenizer, chat_prompts
from services.common.config import load_config
from services.common.transport.weight_feed import verify_weights
from services.common.wire.replay_data import CandidateSets, Replay
from services.reward.scorers.exact_match import build as build_exact_match
from services.rollout.engine.protocol import EngineSample
from services.rollout.groups.assemble import assemble
from services.trainer.batch.groups import batch_samples
from services.trainer.batch.packing import pack
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.plain_engine import PlainEngine
from services.trainer.model.policy import Policy
from services.trainer.update.policy_update import PolicyUpdater
from services.trainer.update.reference import Reference

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
TOKENIZER = build_tokenizer()
LAYERS, EXPERTS, CHOSEN = 2, 8, 2
EXACT = torch.float64


def make_policy(seed: int, noise: float = 0.0) -> Policy:
    """Weights large enough that routing, candidates and reference matter; `noise` away from those of `seed`."""
    model = build_model(TOKENIZER, seed, max_length=64).to(EXACT)
    model.set_experts_implementation("eager")  # The grouped kernel has no float64.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
            parameter.add_(noise * torch.randn_like(parameter))
    return Policy(model).to(EXACT)


def random_sample(prompt: list[int], answer: str, random: np.random.Generator) -> EngineSample:
    """Tokens, experts and candidates drawn at random; one in three has the right text."""
    length = int(random.integers(1, SAMPLING["max_tokens"] + 1))
    tokens = random.integers(5, len(TOKENIZER), length, dtype=np.int32)
    sets = [np.unique(np.append(random.integers(5, len(TOKENIZER), 20), token)).astype(np.int32) for token in tokens]
    scores = random.random((len(prompt) + length - 1, LAYERS, EXPERTS))
    return EngineSample(
        token_ids=tokens,
        logprobs=-random.random(length).astype(np.float32),
        finish_reason="length",
        text=f" {answer}" if random.random() < 1 / 3 else "no",
        spans=(),
        replay=Replay(
            np.argsort(scores, axis=2)[..., :CHOSEN].astype(np.uint8),
            CandidateSets(np.array([len(each) for each in sets], np.int32), np.concatenate(sets)),
        ),
    )


class Batch:
    """Four groups that a policy sampled which is near the one in training."""

    def __init__(self) -> None:
        random, sampler = np.random.default_rng(5), make_policy(1, noise=0.004)
        self.problems = draw_split(random, "train", 4)
        self.prompts = chat_prompts(TOKENIZER, [problem.prompt for problem in self.problems])
        self.groups = [
            [self._drawn(prompt, random_sample(prompt, problem.answer, random), sampler) for _ in range(GROUP_SIZE)]
            for problem, prompt in zip(self.problems, self.prompts, strict=True)
        ]

    @staticmethod
    def _drawn(prompt: list[int], drawn: EngineSample, sampler: Policy) -> EngineSample:
        assert drawn.replay is not None
        sample = TrainSample("", np.asarray(prompt, np.int32), drawn.token_ids, drawn.logprobs, drawn.replay, 0.0)
        with torch.no_grad():
            logprobs, _ = sampler(pack([sample]))
        values = {**vars(drawn), "logprobs": logprobs.float().numpy()}
        return EngineSample(**values)

    def order(self) -> step_pb2.StepOrder:
        """As it reaches the trainer, scored by the reward service's scorer."""
        score, order = build_exact_match(), step_pb2.StepOrder()
        for problem, ids, samples in zip(self.problems, self.prompts, self.groups, strict=True):
            metadata = {"answer": problem.answer}
            prompt = sample_pb2.Prompt(
                group_id=problem.id,
                text=problem.prompt,
                token_ids=ids,
                metadata_json=json.dumps(metadata),
                sampling=sample_pb2.SamplingParameters(**SAMPLING),
                group_size=GROUP_SIZE,
            )
            sampled = assemble(prompt, samples, rollout_id="", code="", config="", seconds=0)
            scored = order.groups.add(group=sampled.group)
            for sample in samples:
                scored.scores.add(reward=score(problem.prompt, sample.text, metadata))
            order.replay.extend(sampled.replays)
        return order


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


def system(batch: Batch, *overrides: str) -> tuple[dict[str, float], torch.Tensor]:
    """Step metrics and gradient of the trainer's update under the quickstart's YAML, in micro-batches of 64 tokens."""
    config = load_config(QUICKSTART, ["trainer.tokens_per_microbatch=64", *overrides], environment={})
    engine = PlainEngine(make_policy(1), torch.device("cpu"), steps_applied=0)
    samples = batch_samples(batch.order(), config, engine.facts)
    values = PolicyUpdater(config, engine, Reference(make_policy(2), torch.device("cpu"))).train(samples)
    gradient = engine.take_gradient()
    assert gradient is not None
    return values, gradient


@pytest.fixture(scope="module")
def system_of_all(batch) -> tuple[dict[str, float], torch.Tensor]:
    return system(batch)


def test_loss_and_gradient_are_those_of_the_system(batch, system_of_all):
    policy = make_policy(1)
    report = loss_and_gradients(policy, make_policy(2), training_samples(batch.problems, batch.prompts, batch.groups))
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])

    values, expected = system_of_all
    assert report.loss == pytest.approx(values["loss"], rel=1e-5)
    # The shares of the tokens are float32 in the system; where a gradient's terms cancel, their rounding is left.
    torch.testing.assert_close(gradient.float(), expected, rtol=1e-5, atol=1e-7 * float(expected.abs().max()))
    assert report.kl == pytest.approx(values["kl"], rel=1e-5)
    assert report.ratio == pytest.approx(values["policy_ratio"], rel=1e-5)
    assert report.masked == pytest.approx(values["masked_fraction"])
    assert report.agreement == pytest.approx(values["routing_agreement"])
    assert 0 < report.masked < 0.5
    assert values["clip_fraction"] > 0


@pytest.mark.parametrize(
    "off",
    [
        "rl_stability.unbiased_kl.estimator=k3",
        "rl_stability.sequence_masking.enabled=false",
        "rl_stability.consistency.keep_routing=false",
        "rl_stability.consistency.keep_sampling_mask=false",
    ],
)
def test_each_mechanism_shows_in_the_gradient(batch, system_of_all, off):
    """So that the comparison above would fail for a page that left one of them out."""
    _, expected = system_of_all
    _, without = system(batch, off)
    assert float((without - expected).norm() / expected.norm()) > 1e-3


def test_samples_are_those_of_the_system(batch):
    config = load_config(QUICKSTART, environment={})
    expected = batch_samples(batch.order(), config, make_policy(1).facts)
    for mine, theirs in zip(training_samples(batch.problems, batch.prompts, batch.groups), expected, strict=True):
        assert (mine.reward, mine.temperature) == (theirs.reward, theirs.temperature)
        assert mine.advantage == pytest.approx(theirs.advantage)


def test_settings_are_those_of_the_quickstart(tmp_path):
    config, mine = load_config(QUICKSTART, environment={}), engine_config(tmp_path)
    assert mine.sampling == config.sampling
    assert mine.model.model_copy(update={"path": ""}) == config.model.model_copy(update={"path": ""})
    assert mine.data.max_prompt_tokens == config.data.max_prompt_tokens
    optimizer = config.trainer.optimizer
    assert config.trainer.groups_per_step == GROUPS
    assert optimizer.learning_rate == one_page.LEARNING_RATE
    assert optimizer.warmup_steps == one_page.WARMUP_STEPS
    assert optimizer.betas == one_page.BETAS
    assert optimizer.max_grad_norm == one_page.MAX_GRAD_NORM
    assert (optimizer.weight_decay, optimizer.decay, config.trainer.max_staleness) == (0, "constant", 1)


class RandomEngine:
    """Samples at random, and keeps what happens to it in order."""

    def __init__(self) -> None:
        self.random, self.events = np.random.default_rng(3), []

    async def generate(self, prompt, sampling, sample_ids, *, capture):
        self.events.append("train" if capture else "evaluate")
        answer = "".join(sorted(filter(str.isdigit, TOKENIZER.decode(prompt))))
        return [random_sample(prompt, answer, self.random) for _ in sample_ids]

    async def load_weights(self, weights):
        verify_weights(weights)
        self.events.append(weights)


async def test_the_loop_samples_one_step_ahead_and_reloads_what_it_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(one_page, "GROUPS", 2)
    model, weights = tmp_path / "model", tmp_path / "weights"
    build_model(TOKENIZER, 1, max_length=64).save_pretrained(model)
    random = np.random.default_rng(0)
    write_jsonl(model / "train.jsonl", draw_split(random, "train", 8))
    write_jsonl(model / "validation.jsonl", draw_split(random, "validation", 3))
    engine = RandomEngine()

    await one_page.train(engine, model, weights, steps=2, seed=1)

    loaded = [event for event in engine.events if not isinstance(event, str)]
    evaluation, draw = ["evaluate"] * 3 * 2, ["train"] * 2
    assert engine.events == [*evaluation, *draw, *draw, loaded[0], *draw, loaded[1], *evaluation]
    assert [version.version for version in loaded] == [1, 2]
    states = [load_file(path / "model.safetensors") for path in (model, weights / "v1", weights / "v2")]
    for before, after in pairwise(states):
        assert before.keys() == after.keys()
        assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_step_follows_the_warmed_up_optimizer(tmp_path, batch):
    build_model(TOKENIZER, 1, max_length=64).save_pretrained(tmp_path)
    learner = Learner(tmp_path)
    samples = training_samples(batch.problems, batch.prompts, batch.groups)
    moved = []
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in learner.policy.parameters()]
        learner.step(samples)
        pairs = zip(before, learner.policy.parameters(), strict=True)
        moved.append(max(float((new.detach() - old).abs().max()) for old, new in pairs))
    # AdamW's first step moves each parameter by its rate, whatever the gradient.
    assert moved[0] == pytest.approx(one_page.LEARNING_RATE / one_page.WARMUP_STEPS, rel=1e-2)
    assert moved[1] > 1.5 * moved[0]
