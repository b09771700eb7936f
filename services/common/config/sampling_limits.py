"""What a sampler takes. Prompts carry temperature and top_p in float32, so that limits are compared in it, too."""

import struct

# vLLM silently raises a lower temperature to this one, and the trainer would replay another distribution.
MIN_TEMPERATURE = 0.01
# vLLM refuses more.
MAX_TEMPERATURE = 2.0
MAX_GROUP_SIZE = 4096
# A prompt carries it in 32 bits.
MAX_TOP_K = 2**32 - 1


def as_float32(number: float) -> float:
    """The nearest number that a prompt can carry. Raises OverflowError for one that is too large."""
    nearest: float = struct.unpack("f", struct.pack("f", number))[0]
    return nearest
