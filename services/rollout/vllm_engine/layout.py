"""Names and shapes of a checkpoint's tensors. vLLM does not survive a reload that breaks them."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from trivet.v1 import weights_pb2

from services.common.errors import InvalidData
from services.common.transport.weight_feed import describe_weights

Layout = dict[str, tuple[int, ...]]


def initial_weights(path: Path) -> weights_pb2.WeightVersion:
    """Version 0. A model that is not a local directory has no fingerprint."""
    if any(path.glob("*.safetensors")):
        return describe_weights(path, 0)
    return weights_pb2.WeightVersion(version=0, path=str(path))


def read_layout(directory: Path) -> Layout:
    """Reads headers only. Raises InvalidData("weights_corrupt") for a file that is not safetensors."""
    layout: Layout = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    layout[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise InvalidData("weights_corrupt", f"{path} is not a safetensors file ({error})") from error
    return layout


def check_layout(found: Layout, expected: Layout, *, tied: bool) -> None:
    """Raises InvalidData("weights_mismatch") that names the first tensor out of place.

    With `tied` embeddings the output head may be there or not.
    """
    optional = {"lm_head.weight"} if tied else set()
    for name in sorted((expected.keys() - found.keys()) - optional):
        raise InvalidData("weights_mismatch", f"tensor {name} is missing, expected shape {list(expected[name])}")
    for name in sorted((found.keys() - expected.keys()) - optional):
        raise InvalidData("weights_mismatch", f"tensor {name} is not one of this model's")
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            raise InvalidData(
                "weights_mismatch", f"tensor {name} has shape {list(found[name])}, expected {list(expected[name])}"
            )
