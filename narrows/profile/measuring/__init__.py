"""Profiles are made here: the only part of `profile` that runs a model."""
