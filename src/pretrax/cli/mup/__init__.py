"""Check that a learning rate found for a narrow model fits wider ones (muP)."""
