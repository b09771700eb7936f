"""What torchrun's agent does with the status that a rank leaves with."""

import pytest

from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED, GAVE_UP

RANK = """
import os, sys, time
from pathlib import Path
directory, status = Path(sys.argv[1]), int(sys.argv[2])
with (directory / os.environ["RANK"]).open("a") as starts:
    starts.write("x")
if os.environ["RANK"] == "1" and status:
    time.sleep(60)
sys.exit(status)
"""


@pytest.mark.parametrize(("status", "starts"), [(FINISHED, 1), (FAILED, 2), (CONFIGURATION, 1), (GAVE_UP, 1)], ids=str)
def test_what_no_restart_mends_is_not_started_again_and_can_be_told(warm_process, tmp_path, status, starts):
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    ended = warm_process.run("services.trainer.launch", *options, str(script), str(tmp_path), str(status))
    assert ended.returncode == status, ended.stderr
    assert (tmp_path / "0").read_text() == "x" * starts
