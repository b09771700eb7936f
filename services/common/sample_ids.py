from trivet.v1 import sample_pb2


def sample_id(prompt: sample_pb2.Prompt, index: int) -> str:
    """Unique in the run, also across re-issues; the same again for a redelivery."""
    return f"{prompt.group_id}/{prompt.attempt}/{index}"
