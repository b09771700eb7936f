"""Why a process ended, in one sentence: from its exit status and from what this attempt of it wrote to its log."""

import json
import re
import signal
from dataclasses import dataclass

from services.common.exit_codes import FINISHED, STOPPED
from services.common.logs import ENDED

# What a rank or vLLM's engine process puts before its words.
_SPEAKER = r"(?:\[rank\d+\]: ?|\(\w+ pid=\d+\) (?:ERROR [^\]]*\] )?)?"
_RAISED = re.compile(_SPEAKER + r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failed|Warning)\b.*)")
# torchrun's own report of a rank.
_RANK_STATUS = re.compile(r"exitcode\s*: (-?\d+)")


@dataclass(frozen=True)
class Ending:
    """`status` is the service's own, where a launcher such as torchrun has another."""

    status: int
    reason: str


def read_ending(status: int, words: str) -> Ending:
    """`words`: what the process wrote since it was started, or the end of that."""
    lines = words.splitlines()
    for line in lines:
        if (ending := _reported(line)) is not None:
            return ending
    if status in {FINISHED, STOPPED}:
        return Ending(status, "something else asked it to stop")
    ranks = [int(found) for found in _RANK_STATUS.findall(words)]
    status = next((rank for rank in ranks if rank < 0), status)
    if status < 0:
        return Ending(status, _signal(-status))
    raised = [found.group(1) for line in lines if (found := _RAISED.fullmatch(line.rstrip()))]
    own = [found for found in raised if not found.startswith("torch.distributed.elastic") and "root cause" not in found]
    spoken = [line for line in lines if line.strip() and not line.startswith("{")]
    return Ending(status, (own or raised or spoken or ["it said nothing"])[-1].strip())


def _reported(line: str) -> Ending | None:
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(entry, dict) or entry.get("event") != ENDED:
        return None
    return Ending(int(entry["exit_code"]), str(entry["reason"]))


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    why = ": memory may have run out" if number == signal.SIGKILL else ""
    return f"killed by {name}{why}"
