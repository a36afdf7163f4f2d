"""`pretrax doctor`: checks the machines of a run before it is trained.

`examination` runs the checks of `checks` on each node, compares the nodes (`judgment`), and makes the table (`table`).
"""
