"""Cohort-Squeeze (SPPM-AS): the figures and tables of Chapter 5."""
