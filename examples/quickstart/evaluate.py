"""Exact-match accuracy of a checkpoint, with transformers alone.

`python -m examples.quickstart.evaluate POLICY PROBLEMS`
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from examples.quickstart.task import Problem, read_jsonl
from examples.quickstart.tokenizer import chat_prompts

BATCH = 256


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 0.99
    max_tokens: int = 16

    def generation_config(self, tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, max_new_tokens=self.max_tokens, **ends)
        return GenerationConfig(
            do_sample=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_new_tokens=self.max_tokens,
            **ends,
        )


GREEDY = Sampling(temperature=0.0)


@torch.inference_mode()
def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], sampling: Sampling, seed: int
) -> list[str]:
    """One completion per prompt, without special tokens; the global random state is left as it was."""
    texts: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), BATCH):
            ids = chat_prompts(tokenizer, prompts[start : start + BATCH])
            batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
            output = model.generate(**batch, generation_config=sampling.generation_config(tokenizer))
            texts += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    sampling: Sampling,
    *,
    samples: int = 1,
    seed: int = 0,
) -> float:
    """The share of `samples` completions per problem that equal the answer."""
    asked = [problem for problem in problems for _ in range(samples)]
    texts = complete(model, tokenizer, [problem.prompt for problem in asked], sampling, seed)
    return sum(text == problem.answer for text, problem in zip(texts, asked, strict=True)) / len(asked)


def directory_accuracy(
    directory: Path, problems: Sequence[Problem], sampling: Sampling, *, samples: int = 1, seed: int = 0
) -> float:
    """`accuracy` of the checkpoint in `directory`, in float32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return accuracy(model, tokenizer, problems, sampling, samples=samples, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.quickstart.evaluate", description=__doc__)
    parser.add_argument("policy", metavar="POLICY", type=Path, help="a checkpoint's policy directory")
    parser.add_argument(
        "problems", metavar="PROBLEMS", type=Path, help="JSONL, such as models/quickstart/validation.jsonl"
    )
    options = parser.parse_args()
    problems = read_jsonl(options.problems)
    greedy = directory_accuracy(options.policy, problems, GREEDY)
    sampled = directory_accuracy(options.policy, problems, Sampling(), samples=4)
    print(f"{options.policy}: greedy {greedy:.3f}, sampled {sampled:.3f} on {len(problems)} problems")  # noqa: T201


if __name__ == "__main__":
    main()
