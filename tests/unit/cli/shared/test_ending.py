import json

import pytest

from services.cli.shared.ending import Ending, read_ending
from services.common.exit_codes import CONFIGURATION, FAILED, GAVE_UP

TORCHRUN = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 3, in <module>
[rank1]: RuntimeError: the tensors do not fit
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4242)
"""

VLLM = """
(EngineCore pid=71) ERROR 12-01 03:07:00 [core.py:1165] Traceback (most recent call last):
(EngineCore pid=71) ERROR 12-01 03:07:00 [core.py:1165] ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "services/rollout/__main__.py", line 60, in main
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def ended(status: int, reason: str) -> str:
    return json.dumps({"event": "ended", "exit_code": status, "reason": reason, "exception": "Traceback …"})


def test_the_service_s_own_sentence_and_status_come_before_its_launcher_s():
    words = "\n".join(["NVML Shared Library Not Found", ended(GAVE_UP, "it diverged"), TORCHRUN])
    assert read_ending(FAILED, words) == Ending(GAVE_UP, "it diverged")


def test_the_first_rank_that_failed_is_the_cause():
    words = "\n".join([ended(CONFIGURATION, "model.path is missing"), ended(FAILED, "connection reset by peer")])
    assert read_ending(FAILED, words) == Ending(CONFIGURATION, "model.path is missing")


@pytest.mark.parametrize(
    ("status", "words", "reason"),
    [
        (-9, "step 3", "killed by SIGKILL: memory may have run out"),
        (1, TORCHRUN.replace("exitcode  : 1", "exitcode  : -9"), "killed by SIGKILL: memory may have run out"),
        (-11, "", "killed by SIGSEGV"),
        (1, TORCHRUN, "RuntimeError: the tensors do not fit"),
        (1, 'Traceback …\n  File "a.py"\nKeyError: \'reward\'\n{"event": "step"}', "KeyError: 'reward'"),
        (3, '{"event": "checkpoint"}', "something else asked it to stop"),
        (1, VLLM, "ValueError: No available memory for the cache blocks."),
        (1, "python: No module named x", "python: No module named x"),
        (1, "", "it said nothing"),
        (1, '{"event": "ended"', "it said nothing"),
    ],
)
def test_without_a_sentence_of_its_own_the_status_and_the_last_words_tell(status, words, reason):
    assert read_ending(status, words).reason == reason
