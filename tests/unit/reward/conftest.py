import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def open_path():
    """A directory that scorers may write to: where tests run as root, scorers may be another user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)
