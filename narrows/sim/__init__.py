"""Serving on virtual time: the real policies, allocator and transfer plan, with costs in place of machines."""
