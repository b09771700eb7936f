"""`trivet init`: the YAML of a first run, from what a model and a dataset look like."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.shared.output import plain_console, say
from services.common.config import PreferenceSourceConfig, SourceConfig
from services.common.data.model_path import check_model_path
from services.common.data.rows import AnySource, Row, read_rows
from services.common.errors import InvalidData, TrivetError
from services.common.exit_codes import CONFIGURATION

ROWS = 10_000
SCHEMA = Path(__file__).parents[2] / "configs" / "run.schema.json"
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
ANSWERS = ("answer", "solution", "target", "ground_truth", "final_answer", "label", "output")
# Not 007, of which each digit counts.
NUMBER = re.compile(r"[-+]?(0|[1-9][0-9,]*)(\.[0-9]+)?")
MAX_TOKENS, LEAST_TOKENS = 512, 16


def init(
    file: Annotated[Path, typer.Argument(help="the YAML to write; one that exists is left alone")],
    model: Annotated[str, typer.Option(help="a Hugging Face checkpoint: a directory or a hub id")],
    dataset: Annotated[
        str, typer.Option(help="a JSONL file, a dataset's directory or hub id, or a task of reasoning-gym")
    ],
    subset: Annotated[
        str | None, typer.Option(help="of a dataset with several configurations, the name of one, such as main")
    ] = None,
    name: Annotated[str | None, typer.Option(help="the run's name; without it, that of the file")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="see docs/algorithms.md; without it grpo, or dpo for preference pairs")
    ] = None,
    scorer: Annotated[
        str | None, typer.Option(help="a built-in one, or module:function; without it, what fits the answers")
    ] = None,
) -> None:
    """Write a commented YAML for a model and a dataset: a first run to be changed from there."""
    console = plain_console()
    try:
        if file.exists():
            raise InvalidData("file_exists", f"{file} exists, expected a new file")
        data = _look_at_data(dataset, subset)
        text = _yaml(file, name or _run_name(file), data, _look_at_model(model, data), algorithm, scorer)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as written:
            written.write(text)
    except (TrivetError, OSError) as error:
        # The reader of rows names the key of a YAML.
        say(console, str(error).replace("--dataset.path", "--dataset"), style="red")
        raise typer.Exit(CONFIGURATION) from error
    say(console, f"✓ {file} is written. Next: trivet check {file}, then trivet up {file}", style="green")


@dataclass(frozen=True)
class Data:
    """What the first rows look like. `answer` is their column with a reference answer; None where there is none."""

    source: AnySource
    rows: list[Row]
    answer: str | None

    @property
    def is_pairs(self) -> bool:
        return isinstance(self.source, PreferenceSourceConfig)


@dataclass(frozen=True)
class Model:
    """`prompt_tokens` and `answer_tokens` are those of the longest row; answers count for pairs alone."""

    path: str
    positions: int
    has_template: bool
    has_gpu: bool
    prompt_tokens: int
    answer_tokens: int


def _look_at_data(dataset: str, subset: str | None) -> Data:
    """Raises InvalidData for rows that no run could be made of, Unavailable where a hub does not answer."""
    kind = _kind(dataset)
    if subset is not None and kind != "hf":
        raise InvalidData("data_subset", f"--subset is {subset!r}, expected none: --dataset {dataset} has no subsets")
    source = SourceConfig(
        kind=kind,
        path=dataset,
        size=1_000 if kind == "reasoning_gym" else None,
        options={} if subset is None else {"name": subset},
    )
    rows = list(read_rows(source, "--dataset", ROWS))
    if not rows:
        raise InvalidData("data_empty", f"--dataset is {dataset!r}, which has no rows")
    columns = rows[0].values
    if {"chosen", "rejected"} <= columns.keys() and kind != "reasoning_gym":
        prompt = _first(PROMPTS, columns) or "prompt"
        pairs = PreferenceSourceConfig(kind=kind, path=dataset, prompt_field=prompt, options=source.options)
        return Data(pairs, rows, None)
    found = _first(PROMPTS, {name: value for name, value in columns.items() if isinstance(value, str)})
    if found is None:
        raise InvalidData(
            "data_column",
            f"--dataset is {dataset!r}, whose columns are {', '.join(columns)}: expected text in one of "
            f"{', '.join(PROMPTS)}, or pairs in chosen and rejected",
        )
    answer = _first(ANSWERS, {name: value for name, value in columns.items() if name != found})
    return Data(source.model_copy(update={"prompt_field": found}), rows, answer)


def _kind(dataset: str) -> Any:
    if dataset.endswith(".jsonl"):
        return "jsonl"
    if "/" not in dataset and not Path(dataset).exists():
        from reasoning_gym.factory import DATASETS

        if dataset in DATASETS:
            return "reasoning_gym"
    return "hf"


def _look_at_model(path: str, data: Data) -> Model:
    """Raises InvalidData where transformers reads no configuration or tokenizer there."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    check_model_path(path, "--model")
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = f"--model is {path!r}, which transformers does not read ({error})"
        raise InvalidData("model_unreadable", reason) from error
    has_template = tokenizer.chat_template is not None

    def longest(columns: Iterable[str]) -> int:
        lengths = [0]
        for row in data.rows:
            for column in columns:
                text = row.values.get(column, "")
                text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
                message = [{"role": "user", "content": text}]
                if has_template:
                    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
                lengths.append(len(tokenizer.encode(text, add_special_tokens=not has_template)))
        return max(lengths)

    return Model(
        path,
        getattr(config, "max_position_embeddings", None) or 2048,
        has_template,
        torch.cuda.device_count() > 0,
        longest([data.source.prompt_field]),
        longest(["chosen", "rejected"]) if data.is_pairs else 0,
    )


def _yaml(file: Path, name: str, data: Data, model: Model, algorithm: str | None, scorer: str | None) -> str:
    """Raises InvalidData where prompts leave no room for completions, or no scorer is known for the answers."""
    # A quarter more than the longest prompt seen, by the page.
    prompt_tokens = min(math.ceil(model.prompt_tokens * 1.25 / 32) * 32, model.positions - LEAST_TOKENS)
    if model.prompt_tokens > prompt_tokens:
        raise InvalidData(
            "prompt_too_long",
            f"--dataset has a prompt of {model.prompt_tokens} tokens, expected at most {prompt_tokens}: --model has "
            f"{model.positions} positions",
        )
    answers = math.ceil(model.answer_tokens * 1.25 / 32) * 32 if data.is_pairs else MAX_TOKENS
    max_tokens = min(answers, model.positions - prompt_tokens)
    length = prompt_tokens + max_tokens
    microbatch = max(4096 if model.has_gpu else 1024, length * (2 if data.is_pairs else 1))
    default, batched = ("dpo", "pairs") if data.is_pairs else ("grpo", "prompts")
    source = {key: value for key, value in data.source.model_dump().items() if key in _written(data.source)}
    schema = Path(os.path.relpath(SCHEMA, file.absolute().parent)).as_posix() if SCHEMA.is_file() else None
    return "\n".join(
        [
            *([f"# yaml-language-server: $schema={schema}"] if schema else []),
            "# Written by `trivet init`. Every key, with default and meaning: docs/configuration.md.",
            "run:",
            f"  name: {name}  # the run's folder is runs/{name}",
            "",
            "model:",
            f"  path: {json.dumps(model.path)}",
            f"  dtype: {'bfloat16' if model.has_gpu else 'float32  # bfloat16 on a GPU'}",
            f"  max_length: {length}  # prompt and completion; the model has {model.positions} positions",
            "",
            "data:",
            f"  {'preferences' if data.is_pairs else 'train'}:",
            *(f"    {key}: {json.dumps(value)}" for key, value in source.items()),
            "  validation_ratio: 0.05  # this share is held out; data.validation takes rows of their own",
            f"  chat_template: {json.dumps(model.has_template)}  # false: prompts are used as they stand",
            f"  max_prompt_tokens: {prompt_tokens}  # the longest prompt has {model.prompt_tokens}",
            "",
            "sampling:",
            *([] if data.is_pairs else ["  group_size: 8  # completions for each prompt", "  temperature: 1.0"]),
            f"  max_tokens: {max_tokens}  # a longer completion is cut off",
            "",
            "algorithm:",
            f"  name: {json.dumps(algorithm or default)}  # docs/algorithms.md says which one when",
            *([] if data.is_pairs else _reward(data, scorer)),
            "",
            "trainer:",
            f"  device: {'auto' if model.has_gpu else 'cpu'}",
            "  steps: 100",
            f"  groups_per_step: {32 if model.has_gpu else 8}  # {batched} in a step's batch",
            f"  tokens_per_microbatch: {microbatch}  # as many as the memory holds, to be faster",
            "  checkpoint_every: 20",
            "  optimizer:",
            "    learning_rate: 1.0e-6  # the first to try out: up to 1.0e-5 for small models",
            "",
        ]
    )


def _written(source: AnySource) -> set[str]:
    """Keys that say something: those that are not as by default."""
    return (
        {"kind", "path", "prompt_field"}
        | ({"size"} if source.size else set())
        | ({"options"} if source.options else set())
        | ({"split"} if source.kind == "hf" else set())
    )


def _reward(data: Data, scorer: str | None) -> list[str]:
    name = scorer or _scorer(data)
    options = f"        answer_field: {json.dumps(data.answer)}  # the row's column with the reference answer"
    takes = ":" not in name and name not in {"reasoning_gym", "regex"} and data.answer not in {None, "answer"}
    return [
        "",
        "reward:",
        "  scorers:  # the reward is their weighted sum, from reward.minimum (0) to reward.maximum (1)",
        f"    - name: {json.dumps(name)}  # docs/rewards.md: the others, their options, and your own function",
        *(["      options:", options] if takes else []),
    ]


def _scorer(data: Data) -> str:
    if data.source.kind == "reasoning_gym":
        return "reasoning_gym"
    if data.answer is None:
        raise InvalidData(
            "data_column",
            f"--dataset is {data.source.path!r}, whose columns are {', '.join(data.rows[0].values)}: expected an "
            f"answer in one of {', '.join(ANSWERS)}, or --scorer module:function",
        )
    answers = [str(row.values.get(data.answer)) for row in data.rows]
    if all(NUMBER.fullmatch(answer) for answer in answers):
        return "numeric"
    return "math_verify" if any("\\" in answer or "$" in answer for answer in answers) else "exact_match"


def _first(names: Iterable[str], columns: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in columns), None)


def _run_name(file: Path) -> str:
    """The file's, as a run may be called."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in file.stem.lower())
    return letters.strip("-")[:63] or "run"
