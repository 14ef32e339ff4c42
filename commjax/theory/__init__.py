"""Every bound and constant of the thesis as a function of plain numbers.

The modules import nothing but the standard library, NumPy and jaxtyping.
"""
