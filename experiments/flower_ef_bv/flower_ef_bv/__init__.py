"""EF-BV on Flower: see app.py."""
