import os

# transformers looks for DeepSpeed, which otherwise warns that it found no GPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
