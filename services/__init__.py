"""Trivet: an RL post-training stack for LLMs."""

# The one source of the version; pyproject.toml reads it.
__version__ = "0.1.0"
