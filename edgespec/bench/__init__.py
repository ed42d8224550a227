"""Measurements that benchmarks, tests and commands share."""
