"""Scafflix: the figures of Chapter 3."""
