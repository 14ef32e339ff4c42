"""Every bound and constant of the thesis as a function of plain numbers.  Imports nothing but the standard library and NumPy."""
