"""The parts of `scripts/make_reference.py`, one for each page or kind of picture."""
