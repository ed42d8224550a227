"""A drafter in a distribution of its own, `edgespec-automaton`."""
