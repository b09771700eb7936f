"""Trivet's algorithm on one page: sample, score, compare, take an optimizer step, hand the new weights to the sampler.

    python -m examples.one_page [--model models/quickstart] [--steps 40] [--seed 1]

It trains the quickstart, a tiny Qwen3-MoE that learns to sort digits, and makes the model first if there is none.
vLLM samples the policy and PyTorch trains it, and under the same weights the two give different probabilities. Four
mechanisms cancel the difference (DeepSeek-V3.2 report, arXiv 2512.02556, section 3.1); comments in capitals name them
where they act: KEEP ROUTING, KEEP SAMPLING MASK, OFF-POLICY SEQUENCE MASK, UNBIASED KL.

The services do the same at scale, joined by Redis:

    sample, reload           services/rollout: any number of vLLM engines, which take new weights while they sample
    score                    services/reward: scorers in processes of their own; what fails is tried again
    advantages, loss, step   services/trainer: seven algorithms, micro-batches over DeepSpeed's ranks, checkpoints
    settings                 configs/quickstart.yaml: the constants below are its values
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.utils import logging as transformers_logging
from trivet.v1 import sample_pb2

from examples.quickstart.__main__ import MAX_LENGTH, build
from examples.quickstart.task import Problem, read_jsonl
from examples.quickstart.tokenizer import build_tokenizer, chat_prompts
from examples.quickstart.warmup import WarmupSettings
from services.common.config import Config, parse_config
from services.common.transport.weight_feed import describe_weights
from services.common.wire.replay_data import Replay
from services.rollout.engine.protocol import Engine, EngineSample
from services.rollout.vllm_engine.environment import set_defaults
from services.trainer.batch.packing import PackedBatch, pack
from services.trainer.batch.samples import TrainSample
from services.trainer.model.policy import Policy, load_policy
from services.trainer.objective.advantages import group_relative
from services.trainer.objective.segments import segment_mean
from services.trainer.objective.sequence_mask import keep_sequences, sequence_divergence

GROUPS, GROUP_SIZE = 32, 8  # prompts per step, samples per prompt
ROW = 16  # samples that go through the model side by side
SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 0.99, "max_tokens": 16}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 16}
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
DIVERGENCE_THRESHOLD, MIN_KEEP_RATIO = 0.1, 0.5  # nats per token; share of a step's sequences
KL_COEF, KL_CLIP_RATIO = 0.001, 5.0
LEARNING_RATE, WARMUP_STEPS, BETAS, MAX_GRAD_NORM = 4e-4, 5, (0.9, 0.95), 1.0

Prompts = Sequence[Sequence[int]]  # token ids
Groups = Sequence[Sequence[EngineSample]]  # the samples of each prompt

console = Console(soft_wrap=True, highlight=False)


async def sample(engine: Engine, prompts: Prompts, settings: dict[str, float], size: int, *, capture: bool) -> Groups:
    """`size` samples of each prompt, all at once: vLLM batches them.

    With `capture` each carries what the trainer needs to replay it: the log-prob of every token as it was drawn (after
    temperature, top-k and top-p), the experts that each position was routed to, and the candidate set that top-k and
    top-p had left for each token.
    """
    parameters = sample_pb2.SamplingParameters(**settings)  # type: ignore[arg-type]
    names = [[f"{number}/{index}" for index in range(size)] for number in range(len(prompts))]
    draws = (engine.generate(ids, parameters, own, capture=capture) for ids, own in zip(prompts, names, strict=True))
    return await asyncio.gather(*draws)


def score(problems: Sequence[Problem], groups: Groups) -> list[list[float]]:
    """1 for the right answer, else 0."""
    return [[float(each.text.strip() == p.answer) for each in group] for p, group in zip(problems, groups, strict=True)]


def training_samples(problems: Sequence[Problem], prompts: Prompts, groups: Groups) -> list[TrainSample]:
    """With advantages: how much better than its group a sample did, in standard deviations of the group's rewards."""
    rewards = torch.tensor(score(problems, groups), dtype=torch.float64)
    group_ids = torch.arange(len(groups)).repeat_interleave(GROUP_SIZE)
    advantages = group_relative(rewards.flatten(), group_ids, "std").reshape(rewards.shape)
    return [
        TrainSample(
            sample_id=f"{problem.id}/{index}",
            prompt_token_ids=np.asarray(prompt, np.int32),
            token_ids=each.token_ids,
            rollout_logprobs=each.logprobs,
            replay=each.replay or Replay(),
            advantage=advantages[number, index].item(),
            reward=rewards[number, index].item(),
            temperature=SAMPLING["temperature"],
        )
        for number, (problem, prompt, group) in enumerate(zip(problems, prompts, groups, strict=True))
        for index, each in enumerate(group)
    ]


@dataclass(frozen=True)
class Report:
    loss: float
    kl: float  # policy ‖ reference, nats per token
    ratio: float  # a token's probability now over that in the sampler; the mean
    masked: float  # share of sequences
    agreement: float  # share of routing choices in which trainer and sampler are of one mind


def loss_and_gradients(policy: Policy, reference: Policy, samples: Sequence[TrainSample]) -> Report:
    """GRPO over the samples of a step. Adds the loss's gradient to each parameter's `grad`."""
    # Samples lie side by side in a row of the model; position ids restart with each, so that none sees another.
    rows = [pack(samples[start : start + ROW]) for start in range(0, len(samples), ROW)]
    logprobs, agreement = replayed_logprobs(policy, rows)
    with torch.no_grad():
        reference_logprobs, _ = replayed_logprobs(reference, rows)
    rollout = torch.cat([row.rollout_logprobs for row in rows])  # [tokens], as the sampler drew them
    advantages = torch.cat([row.advantages for row in rows])  # [sequences]
    sequences = torch.repeat_interleave(torch.tensor([len(each.token_ids) for each in samples]))  # [tokens]

    # OFF-POLICY SEQUENCE MASK: a worse-than-average sample from which the policy has moved away since it was drawn gets
    # no policy term. It is no longer the policy's own mistake, and to push it down further can mislead.
    divergence = sequence_divergence(logprobs.double(), rollout.double(), sequences, len(samples))
    kept = keep_sequences(advantages, divergence, DIVERGENCE_THRESHOLD, MIN_KEEP_RATIO)

    # −min(r·A, clip(r)·A): no more push on a token once its ratio has left the clip range. The denominator is the
    # sampler's own log-prob, so that no further importance weight is needed.
    ratio, advantage = (logprobs - rollout).exp(), advantages[sequences]
    policy_term = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)

    # UNBIASED KL: r · (exp(ref − lp) − (ref − lp) − 1). The tokens are the sampler's and not the policy's; the factor r
    # corrects for that in the value and, because gradient flows through it, in the gradient too.
    distance = reference_logprobs - logprobs
    kl = ratio.clamp(max=KL_CLIP_RATIO) * (distance.expm1() - distance)

    # The mask takes only the policy term away: a masked sequence still counts, and still has its KL to the reference.
    loss = segment_mean(kept[sequences] * policy_term + KL_COEF * kl, sequences, len(samples)).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return Report(loss.item(), kl.mean().item(), ratio.mean().item(), (~kept).double().mean().item(), agreement)


def replayed_logprobs(policy: Policy, rows: Sequence[PackedBatch]) -> tuple[Tensor, float]:
    """Of all completion tokens, under the sampler's decisions; and how often `policy` would have routed as it did."""
    logprobs, agreeing = [], 0
    for row in rows:
        # KEEP ROUTING: hooks on the routers put the sampler's experts in place of the policy's choice. The gates of
        # those experts are the policy's own, so that gradient reaches the router.
        # KEEP SAMPLING MASK: the softmax runs over row.candidates, the tokens that top-k and top-p had left. Over the
        # whole vocabulary each token would look less likely than it was to the sampler.
        logprobs.append(policy(row, keep_routing=True)[0])
        policy.close_routing()
        agreeing += sum(policy.agreement.agreeing) if policy.agreement is not None else 0
    choices = sum(row.positions for row in rows) * max(1, policy.facts.moe_layers)
    return torch.cat(logprobs), agreeing / choices


class Learner:
    """The policy in training with its optimizer, and the frozen policy that it started as."""

    def __init__(self, model: Path) -> None:
        self.policy = load_policy(str(model), dtype="float32")
        self._reference = load_policy(str(model), dtype="float32").requires_grad_(False)
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), LEARNING_RATE, BETAS, weight_decay=0.0)
        self._warmup = LambdaLR(self._optimizer, lambda step: min(1, (step + 1) / WARMUP_STEPS))

    def step(self, samples: Sequence[TrainSample]) -> Report:
        report = loss_and_gradients(self.policy, self._reference, samples)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM, error_if_nonfinite=True)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._warmup.step()
        return report


async def train(engine: Engine, model: Path, weights: Path, steps: int, seed: int) -> None:
    learner, tokenizer, random = Learner(model), build_tokenizer(), np.random.default_rng(seed)
    problems, held_out = read_jsonl(model / "train.jsonl"), read_jsonl(model / "validation.jsonl")

    async def experience() -> list[TrainSample]:
        chosen = [problems[index] for index in random.choice(len(problems), GROUPS, replace=False)]
        prompts = chat_prompts(tokenizer, [problem.prompt for problem in chosen])
        return training_samples(chosen, prompts, await sample(engine, prompts, SAMPLING, GROUP_SIZE, capture=True))

    async def accuracy(settings: dict[str, float], size: int) -> float:
        prompts = chat_prompts(tokenizer, [problem.prompt for problem in held_out])
        return float(np.mean(score(held_out, await sample(engine, prompts, settings, size, capture=False))))

    before = await accuracy(SAMPLING, 4), await accuracy(GREEDY, 1)
    samples, started = await experience(), time.monotonic()
    for step in range(1, steps + 1):
        # vLLM draws the next step's samples while this one trains, so that they are one policy version old when it is
        # their turn (max_staleness 1): the ratio says how far the policy has moved since. The last draw is not used.
        following, report = await asyncio.gather(experience(), asyncio.to_thread(learner.step, samples))
        # RELOAD: the engine compares names, shapes and checksums, pauses, loads, and empties its caches.
        published = weights / f"v{step}"
        learner.policy.model.save_pretrained(published)
        await engine.load_weights(describe_weights(published, step))
        numbers = {"reward": np.mean([each.reward for each in samples]), **vars(report)}
        console.print(f"step {step:3}", *(f"{name} {value:.4f}" for name, value in numbers.items()), sep="  ")
        samples = following
    console.print(f"{steps} steps in {time.monotonic() - started:.1f} s")
    after = await accuracy(SAMPLING, 4), await accuracy(GREEDY, 1)
    for name, was, now in zip(("sampled", "greedy"), before, after, strict=True):
        console.print(f"held-out accuracy, {name}: {was:.3f} -> {now:.3f}")


def engine_config(model: Path) -> Config:
    """What the engine reads of a run's configuration, and the keys that have no default."""
    sections: dict[str, object] = {
        "run": {"name": "one-page"},
        "model": {"path": str(model), "dtype": "float32", "max_length": MAX_LENGTH},
        "data": {"train": {"kind": "jsonl", "path": str(model / "train.jsonl")}, "max_prompt_tokens": 32},
        "sampling": {**SAMPLING, "group_size": GROUP_SIZE},
        "reward": {"scorers": [{"name": "exact_match"}]},
    }
    return parse_config(sections)


async def run(engine: Engine, model: Path, steps: int, seed: int) -> None:
    try:
        await engine.launch()
        with tempfile.TemporaryDirectory(prefix="one-page-") as weights:
            await train(engine, model, Path(weights), steps, seed)
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.one_page", description="Trivet's algorithm on one page.")
    parser.add_argument("--model", type=Path, default=Path("models/quickstart"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)  # The other core is vLLM's.
    transformers_logging.disable_progress_bar()
    if not (options.model / "config.json").exists():
        build(options.model, options.seed, WarmupSettings(), console=console)
    set_defaults()
    # Only now: vLLM reads the environment as it is imported.
    from services.rollout.vllm_engine.engine import VllmEngine

    asyncio.run(run(VllmEngine(engine_config(options.model), options.seed), options.model, options.steps, options.seed))


if __name__ == "__main__":
    main()
