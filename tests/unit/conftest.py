from collections.abc import Iterator

import pytest

from tests.support.shapes import check_shapes, unchecked

check_shapes()


@pytest.fixture
def unchecked_signatures() -> Iterator[None]:
    """What contradicts a signature on purpose reaches the code, whose own error the test is about."""
    with unchecked():
        yield
