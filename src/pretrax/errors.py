"""The one exception for what the user can mend. The command line prints it in at most ten lines and exits with 2."""


class UserError(ValueError):
    """A mistake in a file, a configuration, a flag or a request; the message says what was given and what to change."""
