from collections.abc import Iterator

import pytest

from tests.support.warm_process import WarmProcess


@pytest.fixture(scope="session")
def warm_process() -> Iterator[WarmProcess]:
    """Starts modules of the trainer as programs, which share one import of torch and transformers."""
    modules = ["services.trainer", "services.trainer.launch", "tests.support.trainer.dying_trainer"]
    with WarmProcess(*modules, "transformers.models.auto.tokenization_auto") as process:
        yield process
