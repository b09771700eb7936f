"""A model, a tokenizer and a task made on the spot, so that the whole system runs without a model hub."""
