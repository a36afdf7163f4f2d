"""Commands that a verb prints for its user to type."""

import os


def next_command(command: str) -> str:
    """The command, with `uv run` before it if uv started this one: the user's shell may not know `pretrax` itself."""
    return f'uv run {command}' if 'UV' in os.environ else command
