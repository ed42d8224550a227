"""Draft models adapted to the texts of their user: training data, training, evaluation."""
