"""Benchmarks: prompts, runs, statistics and reports."""
