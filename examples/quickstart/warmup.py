"""Supervised training on imperfect demonstrations: a start that reinforcement learning can improve."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from examples.quickstart.evaluate import Sampling, accuracy
from examples.quickstart.task import Problem, draw_problem, imperfect_answer
from examples.quickstart.tokenizer import chat_prompts

IGNORED = -100


@dataclass(frozen=True)
class WarmupSettings:
    batch_size: int = 128
    learning_rate: float = 4e-3
    ramp_steps: int = 40
    max_grad_norm: float = 1.0
    forget_rate: float = 0.6
    typo_rate: float = 0.3
    target_accuracy: float = 0.27
    least_steps: int = 140
    check_every: int = 10
    most_steps: int = 200


@dataclass(frozen=True)
class WarmupResult:
    """`accuracy` is the one that ended the training: sampled, on the probe."""

    steps: int
    seconds: float
    loss: float
    accuracy: float


def warm_up(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    probe: Sequence[Problem],
    *,
    held_out: Collection[str],
    seed: int,
    settings: WarmupSettings,
    sampling: Sampling,
    console: Console | None = None,
) -> WarmupResult:
    """Trains `model` in place until its sampled accuracy on `probe` reaches the target.

    At least `least_steps` (the probe is small, and luck must not end it early), at most `most_steps`.

    Prompts in `held_out` are never trained on, and the probe should not hold them: it decides when to stop.
    """
    rng = np.random.default_rng([seed, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.ramp_steps))
    start = time.monotonic()
    loss, reached, step = float("nan"), 0.0, 0
    with _progress(console) as progress:
        task = progress.add_task("warm-up", total=settings.most_steps, loss=loss, accuracy=reached)
        model.train()
        for step in range(1, settings.most_steps + 1):
            batch = _demonstrations(rng, tokenizer, settings, held_out)
            loss = _train_step(model, optimizer, batch, settings.max_grad_norm)
            schedule.step()
            if step == settings.most_steps or (step >= settings.least_steps and step % settings.check_every == 0):
                reached = accuracy(model, tokenizer, probe, sampling, seed=seed)
                progress.update(task, accuracy=reached)
                if reached >= settings.target_accuracy:
                    break
            progress.update(task, completed=step, loss=loss)
        model.eval()
    return WarmupResult(step, time.monotonic() - start, loss, reached)


def _demonstrations(
    rng: np.random.Generator, tokenizer: PreTrainedTokenizerFast, settings: WarmupSettings, held_out: Collection[str]
) -> tuple[Int[Tensor, "sequences positions"], Int[Tensor, "sequences positions"]]:
    """Token ids and labels, padded on the right: under causal attention padding there changes nothing."""
    problems: list[Problem] = []
    while len(problems) < settings.batch_size:
        problem = draw_problem(rng)
        if problem.prompt not in held_out:
            problems.append(problem)
    prompts = chat_prompts(tokenizer, [problem.prompt for problem in problems])
    rows = []
    for problem, prompt in zip(problems, prompts, strict=True):
        answer = imperfect_answer(problem.answer, rng, forget_rate=settings.forget_rate, typo_rate=settings.typo_rate)
        rows.append([*prompt, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id])
    longest = max(map(len, rows))
    token_ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        token_ids[index, : len(row)] = torch.tensor(row)
        labels[index, len(prompt) : len(row)] = token_ids[index, len(prompt) : len(row)]
    return token_ids, labels


def _train_step(
    model: Qwen3MoeForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Int[Tensor, "sequences positions"], Int[Tensor, "sequences positions"]],
    max_grad_norm: float,
) -> float:
    loss = _completion_loss(model, *batch)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _completion_loss(
    model: Qwen3MoeForCausalLM,
    token_ids: Int[Tensor, "sequences positions"],
    labels: Int[Tensor, "sequences positions"],
) -> Float[Tensor, ""]:
    """Mean cross-entropy over completion tokens; only their rows pass the output layer."""
    targets = labels[:, 1:]
    kept = targets != IGNORED
    hidden = model.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
    return functional.cross_entropy(model.lm_head(hidden[kept]), targets[kept])


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  sampled accuracy {task.fields[accuracy]:.2f}"),
        TimeElapsedColumn(),
        console=console,
        disable=console is None,
    )
