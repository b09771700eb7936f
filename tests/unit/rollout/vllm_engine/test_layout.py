import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.errors import InvalidData
from services.rollout.vllm_engine.layout import check_layout, read_layout

BASE = {"embed.weight": (4, 2), "lm_head.weight": (4, 2), "norm.weight": (2,)}


def without(name):
    return {key: shape for key, shape in BASE.items() if key != name}


def test_layout_is_read_over_all_shards(tmp_path):
    save_file({"norm.weight": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    save_file({"embed.weight": np.ones((4, 2), np.float16)}, tmp_path / "b.safetensors")
    assert read_layout(tmp_path) == {"norm.weight": (2,), "embed.weight": (4, 2)}


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"not at all")
    with pytest.raises(InvalidData, match=r"a\.safetensors") as failure:
        read_layout(tmp_path)
    assert failure.value.code == "weights_corrupt"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (without("norm.weight"), "norm.weight is missing"),
        ({**BASE, "extra": (1,)}, "extra is not one"),
        ({**BASE, "norm.weight": (3,)}, r"norm.weight has shape \[3\], expected \[2\]"),
        (without("lm_head.weight"), "lm_head.weight is missing"),
    ],
)
def test_what_does_not_fit_is_named(found, words):
    with pytest.raises(InvalidData, match=words) as failure:
        check_layout(found, BASE, tied=False)
    assert failure.value.code == "weights_mismatch"


def test_a_tied_head_may_be_left_out_or_put_in():
    check_layout(without("lm_head.weight"), BASE, tied=True)
    check_layout(BASE, without("lm_head.weight"), tied=True)
