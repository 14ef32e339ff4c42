"""Compressors of pytrees: their constants in C(eta, omega), their wire format and its length in bits.

    identity  top_k  rand_k  comp  mix              sparse: send k coordinates
    natural  dithering  ternary  scaled_sign        quantized: send few bits per coordinate
    m_nice  perm_k                                  joint: the clients coordinate what they send
    scaled  rounded  leafwise                       built from another compressor

C(eta, omega) is the class of randomised maps C on R^d with |E C(x) - x| <= eta |x| and E |C(x) - E C(x)|^2 <= omega
|x|^2; omega_ran is the relative variance of the mean over n clients (`core.compression.Constants`).

A compressor treats a pytree as one vector: top_k(2) sends two numbers in all.  `leafwise` compresses leaf by leaf.
"""

from commjax.compressors.certify import Certificate, ViolatedConstantError, certify
from commjax.compressors.combined import rounded, scaled
from commjax.compressors.format import WireFormatError, check
from commjax.compressors.joint import m_nice, perm_k
from commjax.compressors.quantized import dithering, natural, scaled_sign, ternary
from commjax.compressors.sparse import comp, identity, mix, rand_k, top_k
from commjax.compressors.vectors import leafwise

__all__ = [
    "Certificate",
    "ViolatedConstantError",
    "WireFormatError",
    "certify",
    "check",
    "comp",
    "dithering",
    "identity",
    "leafwise",
    "m_nice",
    "mix",
    "natural",
    "perm_k",
    "rand_k",
    "rounded",
    "scaled",
    "scaled_sign",
    "ternary",
    "top_k",
]
