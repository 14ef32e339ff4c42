"""EF-BV against EF21: the figures and the table of Chapter 2."""
