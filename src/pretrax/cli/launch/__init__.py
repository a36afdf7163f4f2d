"""Train in several processes."""
