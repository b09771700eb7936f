"""What the trainer leaves with: the supervisor and the chart decide by it whether to start it again."""

import pytest
import redis

import services.trainer.__main__ as trainer
from services.common import exit_codes
from services.common.config import parse_config
from services.common.errors import GaveUp, InvalidData, Unavailable
from services.common.serving.arguments import starting


@pytest.fixture
def status(monkeypatch, tmp_path):
    config = parse_config(
        {
            "run": {"name": "exits", "directory": str(tmp_path)},
            "model": {"path": "model"},
            "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
        }
    )
    monkeypatch.setattr(trainer, "parse_service_arguments", lambda _: config)
    monkeypatch.setattr(trainer, "configure_logs", lambda *_: None)
    monkeypatch.setattr(trainer.EXPOSITION, "configure", lambda *_: None)

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(trainer, "leave", leave)

    def of(run):
        monkeypatch.setattr(trainer, "_run", run)
        with pytest.raises(SystemExit) as left:
            trainer.main()
        return left.value.code

    return of


def raising(error, *, while_starting):
    def run(_):
        if while_starting:
            with starting():
                raise error
        raise error

    return run


@pytest.mark.parametrize("error", [ValueError("logprobs holds NaN"), InvalidData("replay_missing", "no replay data")])
def test_only_while_starting_is_it_the_configuration(status, error):
    assert status(raising(error, while_starting=True)) == exit_codes.CONFIGURATION
    assert status(raising(error, while_starting=False)) == exit_codes.FAILED


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GaveUp("too_many_lost_groups", "65 groups in a row were given up"), exit_codes.GAVE_UP),
        (Unavailable("batch_timeout", "no scored group"), exit_codes.FAILED),
        (redis.ConnectionError("refused"), exit_codes.FAILED),
        (OSError("disk is full"), exit_codes.FAILED),
    ],
)
def test_what_ended_the_run_decides(status, error, expected):
    assert status(raising(error, while_starting=False)) == expected
    assert status(raising(error, while_starting=True)) == expected


def test_a_run_ends_finished_or_stopped(status):
    assert status(lambda _: True) == exit_codes.FINISHED
    assert status(lambda _: False) == exit_codes.STOPPED
