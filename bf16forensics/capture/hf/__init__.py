"""Hugging Face models over recorded batches: transformers' own classes, fed from mapped files, no weight read twice."""
