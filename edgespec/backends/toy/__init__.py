"""A small deterministic runtime: linear, tree and recurrent sessions over a hash of the prefix; for tests and docs."""
