"""Compressors: members of C(eta, omega) on pytrees, with their constants, their wire format and its price.

    identity  top_k  rand_k  comp  mix              sparse: k coordinates
    natural  dithering  ternary  scaled_sign        quantized: few bits each
    m_nice  perm_k                                  joint: clients share the work
    scaled  rounded  leafwise                       made of another one

A compressor sees a pytree as one vector, so that top_k(2) sends two numbers in all; `leafwise` works leaf by leaf.
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
