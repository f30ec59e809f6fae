"""Benchmarks behind `narrows bench`: each figure beside a reference from the same run, and its ceiling."""
