"""The trainer's ranks by torchrun: `python -m services.trainer.launch` takes torchrun's arguments.

torchrun would start ranks again whatever they left with, and leaves with status 1 itself. Here what no restart mends is
not started again, and its status is what the supervisor and the chart see.
"""

import sys
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher import api

from services.common.exit_codes import FAILED, NEVER_RESTARTED


class Agent(LocalElasticAgent):
    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and final_status(result.failures) != FAILED:
            self._remaining_restarts = 0
        return result


def final_status(failures: dict[int, Any]) -> int:
    """Of ranks that failed: what no restart mends, where any left with it, else FAILED.

    Ranks that lost a peer may end in another way, and sooner than it is noticed.
    """
    return max(
        (failure.exitcode for failure in failures.values() if failure.exitcode in NEVER_RESTARTED), default=FAILED
    )


@record
def main() -> None:
    # The name under which torchrun makes its agent.
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    try:
        run.main()
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(final_status(error.failures))


if __name__ == "__main__":
    main()
