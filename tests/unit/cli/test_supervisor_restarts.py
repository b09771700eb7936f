import sys

import pytest

from services.cli.processes import ServiceProcess
from services.cli.supervisor import RunFailed, Supervisor
from services.common.config import parse_config
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED, GAVE_UP


def supervised(tmp_path, status):
    config = parse_config(
        {
            "run": {"name": "exits", "directory": str(tmp_path)},
            "model": {"path": "model"},
            "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
        }
    )
    made = Supervisor(config, tmp_path / "run.yaml", [])
    code = f"print('the reason'); raise SystemExit({status})"
    made.trainer = ServiceProcess("trainer", [sys.executable, "-c", code], tmp_path / "trainer.log", restarts_left=1)
    made.services.append(made.trainer)
    made.trainer.start()
    made.trainer._process.wait(30)
    return made


@pytest.mark.parametrize("status", [CONFIGURATION, GAVE_UP])
def test_what_no_restart_mends_is_not_restarted(tmp_path, status):
    made = supervised(tmp_path, status)
    with pytest.raises(RunFailed, match=rf"status {status}.*\n.*the reason"):
        made.finished()
    assert made.trainer.restarts_left == 1


def test_a_failure_is_restarted_and_the_end_is_the_end(tmp_path):
    made = supervised(tmp_path, FAILED)
    assert not made.finished()
    assert made.trainer.restarts_left == 0
    made.trainer.kill()
    assert supervised(tmp_path, FINISHED).finished()
