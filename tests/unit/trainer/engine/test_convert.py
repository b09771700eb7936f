"""The conversion's life, with a shell script for Python; the real converter runs in the integration tests."""

import zipfile
from pathlib import Path

import pytest

from services.trainer.engine import convert
from services.trainer.engine.convert import DONE, Conversion

# `python -P -m MODULE --input_folder TAG --output_folder TARGET --inject_missing_state`
WORKS = '[ "$2" = -c ] && exit 0; mkdir -p "$7" && cat "$5/shard.pt" > "$7/made"'
FAILS = '[ "$2" = -c ] && exit 0; mkdir -p "$7"; echo "no such state" >&2; exit 3'
HANGS = "exec sleep 60"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    # Characters that mean something in patterns.
    directory = tmp_path / "run [1]+"
    (directory / "saved").mkdir(parents=True)
    with zipfile.ZipFile(directory / "saved" / "shard.pt", "w") as archive:
        archive.writestr("data", bytes(1000))
    return directory


def python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(convert.sys, "executable", str(script))


def outcome(checkpoint: Path, longest_seconds: float = 30.0) -> bytes:
    with Conversion(checkpoint, "saved", longest_seconds) as conversion:
        while not (report := conversion.progress(5.0)):
            pass
    return report


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_conversion_appears_whole_and_is_made_anew_at_each_start(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "converting-by-a-crash").mkdir()
    python(monkeypatch, tmp_path, WORKS)
    assert outcome(checkpoint) == DONE
    assert entries(checkpoint) == {"saved", "universal"}
    made = checkpoint / "universal" / "made"
    assert made.read_bytes() == (checkpoint / "saved" / "shard.pt").read_bytes()
    made.write_bytes(b"rotten")
    assert outcome(checkpoint) == DONE
    assert made.read_bytes() == (checkpoint / "saved" / "shard.pt").read_bytes()


def test_a_failed_conversion_says_why_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(monkeypatch, tmp_path, FAILS)
    said = outcome(checkpoint).decode()
    assert said.startswith(f"{checkpoint / 'saved'} cannot be converted")
    assert "exit status 3" in said
    assert "no such state" in said
    assert entries(checkpoint) == {"saved"}


def test_a_conversion_that_hangs_is_ended(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(monkeypatch, tmp_path, HANGS)
    with Conversion(checkpoint, "saved", longest_seconds=0.2) as conversion:
        assert conversion.progress(0.01) == b""
        process = conversion._process
        assert b"it took too long" in conversion.progress(5.0)
    assert process is not None
    assert process.returncode is not None
    assert entries(checkpoint) == {"saved"}


def test_a_damaged_shard_is_found_before_it_is_converted(checkpoint: Path) -> None:
    shard = checkpoint / "saved" / "shard.pt"
    content = bytearray(shard.read_bytes())
    content[500] ^= 1
    shard.write_bytes(content)
    assert b"saved/shard.pt is damaged: data" in outcome(checkpoint)
    assert entries(checkpoint) == {"saved"}


def test_a_directory_that_cannot_be_written_is_named(checkpoint: Path) -> None:
    missing = checkpoint / "missing"
    assert outcome(missing).startswith(f"{missing} cannot be converted".encode())
