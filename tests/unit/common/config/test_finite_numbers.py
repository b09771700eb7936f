"""No number of the configuration is NaN or infinite, and no line that a run leaves is other than JSON."""

import copy
import json
import math
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import structlog
import yaml
from pydantic import BaseModel

from services.common.config import Config, ConfigError, parse_config
from services.common.logs import configure_logs
from services.common.run_files.compare_report import ComparedStep, CompareReport
from services.common.run_files.rerun_report import MetricPair
from services.common.run_files.run_log import RunLog
from services.common.strict_json import strict

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"
NUMBERS = [math.nan, math.inf, -math.inf]


def paths_of(kind: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Of every number below a model, and what to put around it."""
    origin = get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        found = [paths_of(field.annotation, (*path, name)) for name, field in kind.model_fields.items()]
    elif origin in (Union, UnionType):
        found = [paths_of(each, path) for each in get_args(kind)]
    elif origin is list:
        found = [paths_of(get_args(kind)[0], (*path, 0))]
    elif origin is tuple:
        found = [[(path, lambda number: [number, 0.5])]] if float in get_args(kind) else []
    elif origin is dict:
        found = [[(path, lambda number: {"outer": {"inner": [1.0, number]}})]]
    else:
        found = [[(path, lambda number: number)]] if kind in (float, int) else []
    return [each for part in found for each in part]


FIELDS = [(path, around) for path, around in paths_of(Config) if path[0] != "prepare"]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        following = tree[key] if isinstance(tree, list) or tree.get(key) else tree.setdefault(key, {})
        tree = following
    tree[last] = value


def test_the_fields_are_those_that_there_are():
    found = {".".join(map(str, path)) for path, _ in FIELDS}
    assert {
        "rl_stability.sequence_masking.divergence_threshold",
        "trainer.optimizer.learning_rate",
        "trainer.optimizer.betas",
        "trainer.deepspeed",
        "rollout.engine",
        "reward.minimum",
        "reward.scorers.0.weight",
        "reward.scorers.0.options",
        "data.train.options",
        "sampling.temperature",
        "rl_stability.importance_sampling.calibration.initial",
    } <= found
    assert len(found) > 60


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize(("path", "around"), FIELDS, ids=[".".join(map(str, path)) for path, _ in FIELDS])
def test_no_number_is_nan_or_infinite(path, around, number):
    tree = copy.deepcopy(yaml.safe_load(QUICKSTART.read_text(encoding="utf-8")))
    put(tree, path, around(number))
    with pytest.raises(ConfigError) as refusal:
        parse_config(tree)
    assert ".".join(map(str, path)) in str(refusal.value)
    assert str(number) in str(refusal.value)


def test_an_assignment_is_checked_too():
    config = parse_config(yaml.safe_load(QUICKSTART.read_text(encoding="utf-8")))
    with pytest.raises(ValueError, match="finite"):
        config.trainer.optimizer.learning_rate = math.inf
    with pytest.raises(ValueError, match=r"fp16\.loss_scale is nan, expected a finite number"):
        config.trainer.deepspeed = {"fp16": {"loss_scale": math.nan}}


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_lines_of_a_run_are_json_and_what_is_not_finite_is_left_out_of_what_is_read(tmp_path):
    run_log = RunLog(tmp_path)
    run_log.add_step({"step": 1, "metrics": {"loss": math.nan, "ratio_max": math.inf, "kl": -math.inf, "entropy": 0.5}})
    run_log.add_evaluation({"step": 1, "metrics": {"preference_accuracy": math.nan, "preference_loss": 0.25}})
    for name in ("steps", "evaluations"):
        json.loads((tmp_path / f"{name}.jsonl").read_text(encoding="utf-8"), parse_constant=refuse)
    written = json.loads((tmp_path / "steps.jsonl").read_text(encoding="utf-8"))
    assert written["metrics"] == {"loss": None, "ratio_max": None, "kl": None, "entropy": 0.5}
    assert run_log.steps()[0]["metrics"] == {"entropy": 0.5}
    assert run_log.evaluations()[0]["metrics"] == {"preference_loss": 0.25}


def test_lines_of_earlier_versions_are_read_without_what_is_not_finite(tmp_path):
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "metrics": {"loss": NaN, "kl": Infinity, "entropy": 0.5}}\n')
    assert RunLog(tmp_path).steps()[0]["metrics"] == {"entropy": 0.5}


def test_a_log_line_is_json():
    try:
        configure_logs("trainer", "run")
        processors = structlog.get_config()["processors"]
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    entry = {"event": "step", "loss": math.nan, "values": {"ratio": [math.inf, 1.0]}}
    for processor in processors:
        entry = processor(None, "info", entry)
    read = json.loads(entry, parse_constant=refuse)
    assert (read["loss"], read["values"]) == (None, {"ratio": [None, 1.0]})


def test_reports_are_json_and_keep_what_is_not_finite():
    pair = MetricPair(name="loss", recorded=math.nan, rerun=math.inf, equal=False)
    text = pair.model_dump_json()
    json.loads(text, parse_constant=refuse)
    again = MetricPair.model_validate_json(text)
    assert math.isnan(again.recorded)
    assert again.rerun == math.inf
    steps = tuple(
        ComparedStep(step=step, samples=1, metrics=({"loss": loss},), cosines=((None,),))
        for step, loss in enumerate([math.nan, 1.0, 3.0])
    )
    report = CompareReport(run="run", algorithms=("grpo",), overrides=((),), steps=steps)
    text = report.model_dump_json()
    json.loads(text, parse_constant=refuse)
    again = CompareReport.model_validate_json(text)
    assert math.isnan(again.steps[0].metrics[0]["loss"])
    assert again.mean("loss", 0) == 2


def test_strict_leaves_everything_else_as_it_is():
    value = {"a": [1, 2.5, "x", True, None], "b": {"c": 0.0}}
    assert strict(value) == value
