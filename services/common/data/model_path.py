"""What the path of a model has to be: a checkpoint's directory or a hub id. Reads no model and asks no hub."""

from pathlib import Path

from services.common.errors import InvalidData

WEIGHTS = ("*.safetensors", "*.bin")


def check_model_path(path: str, key: str) -> None:
    """Raises InvalidData that names `key` where there is no checkpoint and none could come from the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    given, directory = f"{key} is {path!r}", Path(path)
    if directory.is_file():
        raise InvalidData("model_missing", f"{given}, expected a directory: it is a file")
    if not directory.is_dir():
        try:
            validate_repo_id(path)
        except HFValidationError as error:
            raise InvalidData(
                "model_missing",
                f"{given}, expected a checkpoint's directory or a hub id: there is no such directory",
            ) from error
    elif not (directory / "config.json").is_file():
        raise InvalidData("model_missing", f"{given}, expected a checkpoint: there is no config.json")
    elif not any(file.stat().st_size for pattern in WEIGHTS for file in directory.glob(pattern)):
        raise InvalidData("model_missing", f"{given}, expected a checkpoint: there are no weights ({WEIGHTS[0]})")
