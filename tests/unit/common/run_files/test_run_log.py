import json
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.common.run_files.run_log import RunLog


def entry(step: int, **more) -> dict:
    return {"step": step, "groups": ["a-1", "ü"], "metrics": {"reward_mean": step / 10}, **more}


def steps(directory: Path) -> list[int]:
    return [found["step"] for found in RunLog(directory).steps()]


@pytest.fixture
def file(tmp_path) -> Path:
    run_log = RunLog(tmp_path)
    for step in (1, 2, 3):
        run_log.add_step(entry(step))
        run_log.add_evaluation(entry(step))
    return tmp_path / "steps.jsonl"


WHOLE = json.dumps(entry(3), sort_keys=True)


@pytest.mark.parametrize("cut", [1, 10, len(WHOLE) // 2, WHOLE.index("}") + 1, len(WHOLE) - 1])
def test_a_last_line_that_was_cut_off_is_passed_over_and_taken_out_before_the_next(file, cut):
    file.write_bytes(file.read_bytes()[: -len(WHOLE) - 1] + WHOLE[:cut].encode())
    with capture_logs() as logs:
        assert steps(file.parent) == [1, 2]
    assert logs[0]["event"] == "a damaged line is skipped"
    assert (logs[0]["file"], logs[0]["line"]) == (str(file), 3)
    RunLog(file.parent).add_step(entry(3))
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_last_line_that_lacks_only_its_end_is_kept(file):
    file.write_bytes(file.read_bytes()[:-1])
    assert steps(file.parent) == [1, 2, 3]
    RunLog(file.parent).add_step(entry(4))
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 20, len(WHOLE) // 2, len(WHOLE) - 2])
def test_a_record_that_an_older_version_wrote_behind_a_torn_one_is_found(file, cut):
    with file.open("a", encoding="utf-8") as appended:
        appended.write(WHOLE[:cut].replace('"step": 3', '"step": 4') + json.dumps(entry(5)) + "\n")
        appended.write(json.dumps(entry(6)) + "\n")
    assert steps(file.parent) == [1, 2, 3, 5, 6]


@pytest.mark.parametrize(
    "garbage", [b"\0\0\0\0", b"\xff\xfe{", b"[1, 2]", b'{"step": "3", "metrics": {}}', b'{"step": 3}']
)
def test_a_line_that_is_no_record_is_passed_over_wherever_it_is(file, garbage):
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(whole[0] + garbage + b"\n" + b"".join(whole[1:]))
    assert steps(file.parent) == [1, 2, 3]


def test_evaluations_are_read_in_the_same_way(file):
    evaluations = file.with_name("evaluations.jsonl")
    evaluations.write_bytes(evaluations.read_bytes()[:-9])
    assert [found["step"] for found in RunLog(file.parent).evaluations()] == [1, 2]


# The kernel takes the part of a line that still fits, as on a full disk, and then no more.
FULL = """
import resource, signal, sys
from pathlib import Path
from services.common.run_files.run_log import RunLog

run_log, file = RunLog(Path(sys.argv[1])), Path(sys.argv[1]) / "steps.jsonl"
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, resource.RLIM_INFINITY))
try:
    run_log.add_step({"step": 4, "metrics": {"reward_mean": 0.5}})
except OSError as error:
    print(type(error).__name__)
"""


def test_a_disk_that_is_full_leaves_whole_lines_only(file):
    before = file.read_bytes()
    ended = subprocess.run([sys.executable, "-c", FULL, str(file.parent)], capture_output=True, text=True, check=True)
    assert ended.stdout == "OSError\n"
    assert file.read_bytes() == before


def test_a_line_of_before_is_read_by_the_names_of_today(file):
    metrics = {"ratio": 1.0, "first_ratio_p99": 1.5, "pairs": 4.0, "masked_sequence_ratio": 0.1, "masked_fraction": 0.1}
    RunLog(file.parent).add_step(entry(4, metrics=metrics))
    now = {"policy_ratio": 1.0, "first_policy_ratio_p99": 1.5, "preference_pairs": 4.0, "masked_fraction": 0.1}
    assert RunLog(file.parent).steps()[-1]["metrics"] == now
