"""Proof that sampler and trainer agree: samples recomputed under the weights that drew them."""
