"""python -m services.trainer.audit --config FILE --rollout HOST:PORT --output report.json: one audit of a rollout.

The rollout's token, where it wants one, comes from the variable TRIVET_TOKEN or from rollout.server.token.
"""

import argparse
import os

from services.common.config import all_overrides, load_config
from services.common.logs import configure_logs
from services.common.run_files.audit_report import AuditReport
from services.common.serving.arguments import add_config, add_output, add_overrides, leave, write_report
from services.trainer.audit.auditor import audit
from services.trainer.audit.sampling import RolloutClient

TOKEN_VARIABLE = "TRIVET_TOKEN"  # noqa: S105


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    configure_logs("audit", "")
    return write_report(lambda: _audit(arguments), arguments.output)


def _audit(arguments: argparse.Namespace) -> AuditReport:
    config = load_config(arguments.config, all_overrides(arguments.overrides))
    configure_logs("audit", config.run.name)
    client = RolloutClient(arguments.rollout, os.environ.get(TOKEN_VARIABLE) or config.rollout.server.token)
    try:
        return audit(config, client, arguments.samples)
    finally:
        client.close()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.audit")
    add_config(parser)
    add_overrides(parser)
    parser.add_argument("--rollout", required=True, metavar="HOST:PORT", help="gRPC address of the rollout")
    parser.add_argument("--samples", type=_positive, default=64, help="how many to draw, in whole groups")
    add_output(parser)
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, expected at least 1")
    return number


if __name__ == "__main__":
    leave(main())
