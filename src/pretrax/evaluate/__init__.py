"""Evaluation on tasks: what a language model is asked, how it answers, and how the answers become numbers."""
