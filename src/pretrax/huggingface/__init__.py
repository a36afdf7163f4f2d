"""Import and export of Hugging Face checkpoints. Each family has one table of names and one of configuration fields."""
