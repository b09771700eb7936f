import errno
import json
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


def test_a_disk_that_is_full_leaves_whole_lines_only(file, monkeypatch):
    before = file.read_bytes()
    opened = Path.open

    class Full:
        """Takes part of what is written, as a full disk does."""

        def __init__(self, real) -> None:
            self.real = real

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_) -> None:
            self.real.close()

        def write(self, data: bytes) -> None:
            self.real.write(data[:20])

        def flush(self) -> None:
            self.real.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(path: Path, mode: str = "r", **options):
        real = opened(path, mode, **options)
        return Full(real) if mode == "ab" else real

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        RunLog(file.parent).add_step(entry(4))
    assert file.read_bytes() == before
