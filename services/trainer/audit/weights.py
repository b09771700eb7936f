"""Which files hold the weights that a rollout has loaded."""

from pathlib import Path

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.transport.weight_feed import describe_weights


def find_weights(config: Config, version: int, fingerprint: str) -> str:
    """A directory whose files have this fingerprint, or the model itself where a hub id is at version 0.

    Raises InvalidData("weights_unknown") when neither the run's published versions nor the model's files are it.
    """
    model, published = Path(config.model.path), config.run.path / "weights"
    if not fingerprint and not model.is_dir():
        return config.model.path
    candidates = [*published.glob(f"v*-{fingerprint[:8]}"), model] if fingerprint else []
    for directory in candidates:
        if directory.is_dir() and describe_weights(directory, version).fingerprint == fingerprint:
            return str(directory)
    # A version that went from memory to memory has no files (weights.disk_every).
    where = str(published) if config.weights.transfer == "disk" else f"{published} (only some versions are)"
    raise InvalidData(
        "weights_unknown",
        f"the rollout samples with version {version} (fingerprint {fingerprint or 'none'}), which is neither in "
        f"{where} nor model.path ({model}): give the run's own configuration, where its directory can be read",
    )
