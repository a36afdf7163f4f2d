"""Runs that share only a bucket train one model: each island trains by itself, and they average what they learned.

`registry` gives an island its share of the data, `rounds` closes rounds, and `objects` is what both write in the
bucket. All keys are known, so nothing is listed, and other objects in the bucket do nothing.
"""
