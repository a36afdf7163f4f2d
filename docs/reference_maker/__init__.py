"""The parts of `docs/make_reference.py`, one for each page or kind of picture."""
