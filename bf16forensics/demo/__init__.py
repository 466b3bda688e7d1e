"""Files of `bf16forensics demo`: two checkpoints and their recorded batch, made by examples/make_demo.py."""
