"""One method a file.  Use the modules qualified: `ef_bv.ef_bv(...)`, `ef_bv.HParams`, `ef_bv.theoretical(...)`."""
