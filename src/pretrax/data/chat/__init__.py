"""Chat templates: conversations as tokens."""
