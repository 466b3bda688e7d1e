"""bf16forensics: finds out why low-precision attention ruins a training run."""

__version__ = "0.1.0"
