"""Checkpoints of Hugging Face, in and out: one table of names and one of configuration fields a family."""
