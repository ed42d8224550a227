"""Drafters: one file for each kind."""
