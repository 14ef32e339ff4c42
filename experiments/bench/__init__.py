"""Benchmarks. All sides of a benchmark run in one call on one machine."""

import os

# On Intel CPUs that advertise AMX, torch's bfloat16 products die with an illegal instruction. Torch reads this variable
# when it is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
