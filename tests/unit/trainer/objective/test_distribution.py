import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import QUANTILES, histogram_of, quantiles_of

LOG_RATIOS = st.lists(
    st.one_of(st.floats(-100, 100), st.floats(-0.1, 0.1), st.floats(-1e-5, 1e-5)), min_size=1, max_size=300
)


def ratios(logs):
    return torch.tensor(logs, dtype=torch.float64).exp()


def exact(logs, share):
    """The order statistic, by counting in integers: share is in thousandths."""
    rank = max(1, -(-round(share * 1000) * len(logs) // 1000))
    return float(np.sort(logs)[rank - 1])


def near(log_quantile):
    return pytest.approx(log_quantile, abs=0.008 * (abs(log_quantile) + 0.001))


@given(LOG_RATIOS)
def test_quantiles_are_within_the_stated_bound(logs):
    found = quantiles_of(histogram_of(ratios(logs)))
    assert list(found) == list(QUANTILES)
    for name, share in QUANTILES.items():
        assert math.log(found[name]) == near(exact(logs, share)), name


@given(LOG_RATIOS, LOG_RATIOS)
def test_histograms_add_up(ours, theirs):
    together = histogram_of(ratios(ours + theirs))
    assert torch.equal(histogram_of(ratios(ours)) + histogram_of(ratios(theirs)), together)
    assert together.sum() == len(ours) + len(theirs)


@pytest.mark.parametrize("far", [1, 9, 10, 11, 20])
def test_rank_of_the_quantile(far):
    """Of 1000 ratios, p99 and p999 leave 10 and 1 above them."""
    found = quantiles_of(histogram_of(torch.cat([torch.ones(1000 - far), torch.full((far,), 3.0)])))
    assert (found["p99"] > 2) == (far > 10)
    assert (found["p999"] > 2) == (far > 1)
    assert found["p1"] == found["p50"] == 1


def test_the_lowest_hundredth():
    found = quantiles_of(histogram_of(torch.cat([torch.ones(990), torch.full((10,), 0.25)])))
    assert math.log(found["p1"]) == near(math.log(0.25))
    assert found["p50"] == 1


def test_what_no_float_holds_is_counted_at_the_ends():
    far = histogram_of(torch.tensor([0.0, math.inf, math.nan]))
    assert far.sum() == 3
    assert (far[0], far[-1]) == (1, 2)
    found = quantiles_of(far)
    assert math.log(found["p1"]) == pytest.approx(-100, rel=0.02)
    assert math.log(found["p999"]) == pytest.approx(100, rel=0.02)


def test_no_ratio_has_no_quantile():
    assert all(math.isnan(value) for value in quantiles_of(histogram_of(torch.ones(0))).values())
