import numpy as np
import pytest
from trivet.v1 import weights_pb2

from services.rollout.capture.native import candidate_sets, moe_routing
from services.rollout.engine.protocol import EngineFailed
from services.rollout.vllm_engine.outputs import read_label, weight_label


def test_all_layer_routing_is_mapped_to_the_moe_layers():
    # Layer 0 is dense: vLLM leaves its slot at whatever it held.
    routed = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2)
    routing = moe_routing(routed, [1, 3])
    np.testing.assert_array_equal(routing, routed[:, [1, 3]])
    assert routing.dtype == np.uint8
    assert routing.flags.c_contiguous


def test_a_dense_model_has_no_routing():
    assert moe_routing(None, []) is None
    assert moe_routing(np.zeros((2, 3, 1), np.uint8), []) is None


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("routed", "code"),
    [
        (None, "routing_missing"),
        (np.zeros((5, 2, 2), np.uint8), "routing_shape"),
        (np.zeros((5, 4), np.uint8), "routing_shape"),
    ],
)
def test_missing_or_misshapen_routing_is_named(routed, code):
    with pytest.raises(EngineFailed) as failure:
        moe_routing(routed, [1, 3])
    assert failure.value.code == code


def test_masks_become_rows():
    sets = candidate_sets([[5, 2], [7], [1, 2, 3]])
    assert sets.counts.tolist() == [2, 1, 3]
    assert sets.token_ids.tolist() == [5, 2, 7, 1, 2, 3]
    assert sets.counts.dtype == sets.token_ids.dtype == np.int32


def test_a_missing_mask_is_named():
    with pytest.raises(EngineFailed) as failure:
        candidate_sets(None)
    assert failure.value.code == "candidates_missing"


def test_labels_carry_version_and_fingerprint():
    span = read_label("12:00ff", 3, 9)
    assert (span.version, span.fingerprint, span.start, span.end) == (12, "00ff", 3, 9)
    assert read_label("0:", 0, 1).fingerprint == ""
    assert weight_label(weights_pb2.WeightVersion(version=12, fingerprint="00ff")) == "12:00ff"
