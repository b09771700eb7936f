import os
import subprocess
import sys

import pytest

from services.common.run_files.atomic import write_atomically

FULL = """
import resource, signal, sys
from pathlib import Path
from services.common.run_files.atomic import write_atomically

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
try:
    write_atomically(Path(sys.argv[1]), "x" * 100)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("before", [None, "the old one"])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, before):
    file = tmp_path / "report.json"
    if before is not None:
        file.write_text(before)
    ended = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, check=True)
    assert ended.stdout == "OSError\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == ([before] if before else [])


def test_a_link_stays_one_and_what_is_no_file_is_not_replaced(tmp_path):
    link, file, pipe = tmp_path / "link", tmp_path / "file", tmp_path / "pipe"
    link.symlink_to(file)
    write_atomically(link, "content")
    assert link.is_symlink()
    assert file.read_text() == "content"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "content")
    assert os.read(reading, 100) == b"content"
    os.close(reading)
    assert pipe.is_fifo()
