import errno

import pytest

from services.common.errors import Unavailable, one_sentence


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (Unavailable("batch_timeout", "no scored group for 60 s"), "no scored group for 60 s"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/steps.jsonl"),
            "the disk is full: runs/a/steps.jsonl cannot be written (No space left on device)",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            "the disk is full: a file cannot be written (Disk quota exceeded)",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "PermissionError: [Errno 13] Permission denied: 'x'"),
        (OSError("cannot listen on port 1"), "cannot listen on port 1"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
    ],
)
def test_what_went_wrong_is_one_sentence(error, sentence):
    assert one_sentence(error) == sentence
