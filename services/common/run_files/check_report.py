"""What a service finds wrong with a configuration before anything is started."""

from services.common.run_files.report import Report


class CheckReport(Report):
    """Sentences, each with the key to change: `findings` keep the service from starting, `doubts` do not."""

    KIND = "a check's report"

    findings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
