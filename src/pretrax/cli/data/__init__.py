"""Create, inspect and change token files."""
