"""`pretrax doctor`: checks the machines of a run before it is trained.

`diagnosis` runs the checks of `checks` on each node, compares the nodes (`comparison`), and makes the table (`table`).
"""
