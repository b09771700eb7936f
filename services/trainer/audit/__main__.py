"""python -m services.trainer.audit --config FILE --rollout HOST:PORT --output report.json: one audit of a rollout.

The rollout's token, where it wants one, comes from the variable TRIVET_TOKEN or from rollout.server.token.
"""

import argparse
import os
import sys
from pathlib import Path

from services.common.config import ConfigError, load_config
from services.common.errors import InvalidData, TrivetError, one_sentence
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED
from services.common.logs import configure_logs
from services.common.run_files.atomic import write_atomically
from services.common.serving.arguments import inherited_overrides, report_end
from services.trainer.audit.auditor import audit
from services.trainer.audit.sampling import RolloutClient

TOKEN_VARIABLE = "TRIVET_TOKEN"  # noqa: S105


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    configure_logs("audit", "")
    try:
        config = load_config(arguments.config, [*inherited_overrides(), *arguments.overrides])
        configure_logs("audit", config.run.name)
        client = RolloutClient(arguments.rollout, os.environ.get(TOKEN_VARIABLE) or config.rollout.server.token)
        try:
            report = audit(config, client, arguments.samples)
        finally:
            client.close()
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.output, report.model_dump_json(indent=2) + "\n")
    except (ConfigError, InvalidData) as error:
        return report_end(CONFIGURATION, str(error))
    except (TrivetError, OSError) as error:
        return report_end(FAILED, one_sentence(error))
    return FINISHED


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.audit")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help="override; repeatable"
    )
    parser.add_argument("--rollout", required=True, metavar="HOST:PORT", help="gRPC address of the rollout")
    parser.add_argument("--samples", type=_positive, default=64, help="how many to draw, in whole groups")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the report goes, as JSON")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, expected at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
