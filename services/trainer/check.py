"""python -m services.trainer.check --config FILE --output report.json: what would keep a trainer from starting.

It loads no model, and looks at the first rows of large data only: the trainer itself looks at all of them as it starts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from services.common.config import Config, DataConfig
from services.common.data.rows import Row, need_column, read_rows
from services.common.errors import InvalidData, TrivetError
from services.common.run_files.check_report import CheckReport
from services.common.serving.arguments import check_module
from services.trainer.data.model_files import (
    check_model,
    model_paths,
    model_positions,
    open_tokenizer,
    unstopped_turn,
)
from services.trainer.data.preferences import load_preferences
from services.trainer.data.prompts import load_prompts
from services.trainer.data.rows import use_rows
from services.trainer.update.algorithm import configured_algorithm

ROWS = 10_000


def report(config: Config) -> CheckReport:
    found = find_problems(config)
    made = config.prepare is None or config.prepare.done
    doubt = None
    if made and not found and config.data.preferences is None:
        doubt = unstopped_turn(config, open_tokenizer(config.model.path))
    return CheckReport(findings=tuple(found), doubts=() if doubt is None else (doubt,))


def find_problems(config: Config) -> list[str]:
    """A sentence for each, data first. What is yet to be made (prepare) is left out."""
    found = _problem(lambda: configured_algorithm(config))
    if config.prepare is not None and not config.prepare.done:
        return found
    models = [problem for key, path in model_paths(config) for problem in _problem(partial(check_model, path, key))]
    # Without its model there is no tokenizer: the rows are read as they stand.
    if any("model.path" in sentence for sentence in models):
        return found + _problem(lambda: _read_rows(config.data)) + models
    longest: list[int] = []
    found += _problem(lambda: longest.append(_read_data(config))) + models
    return found + list(_too_few_positions(config, longest))


def _read_data(config: Config) -> int:
    """Tokens of the longest prompt."""
    tokenizer = open_tokenizer(config.model.path)

    def read(most: int | None) -> int:
        if config.data.preferences is not None:
            pairs = load_preferences(config, tokenizer, most)
            return max(len(row.prompt_token_ids) for part in (pairs.train, pairs.validation) for row in part.rows)
        prompts = load_prompts(config.data, tokenizer, config.run.seed, most)
        return max(len(row.token_ids) for part in (prompts.train, prompts.validation) for row in part.rows)

    try:
        return read(ROWS)
    except InvalidData as error:
        # What the first rows lack the others may have.
        if error.code != "data_empty":
            raise
        return read(None)


def _read_rows(data: DataConfig) -> None:
    for name in ("train", "validation", "preferences"):
        source = getattr(data, name)
        if source is None:
            continue
        fields = [field for field in ("prompt_field", "chosen_field", "rejected_field") if hasattr(source, field)]
        # A pair's prompt may be part of its answers.
        columns = {field: getattr(source, field) for field in (fields[1:] or fields)}
        use_rows(read_rows(source, f"data.{name}", ROWS), partial(_named_columns, key=f"data.{name}", columns=columns))


def _named_columns(row: Row, *, key: str, columns: Mapping[str, str]) -> None:
    for field, column in columns.items():
        need_column(row, column, f"{key}.{field}")


def _too_few_positions(config: Config, longest: Sequence[int]) -> Iterator[str]:
    """A sentence where model.max_length is more than the model can tell apart; vLLM would not start with it."""
    positions = model_positions(config.model.path)
    if positions is None or config.model.max_length <= positions:
        return
    wanted = config.data.max_prompt_tokens + config.sampling.max_tokens
    sentence = (
        f"model.max_length is {config.model.max_length}, expected at most {positions}, the positions of model.path"
    )
    if wanted > positions:
        sentence += f", and data.max_prompt_tokens + sampling.max_tokens ({wanted}) no more than that"
        sentence += "".join(f"; the longest prompt has {tokens} tokens" for tokens in longest)
    yield sentence


def _problem(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except (TrivetError, ValueError) as error:
        return [str(error)]
    return []


if __name__ == "__main__":
    check_module("trainer", report)
