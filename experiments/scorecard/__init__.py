"""Every claim of the thesis that a machine can check, in one table."""
