"""SymWanda and R^2-DSnoT: the tables of Chapter 6."""
