"""Benchmarks: all sides in one run on one machine."""

import os

# On Intel CPUs that advertise AMX, torch's bfloat16 products die with an illegal instruction.  It reads this when it is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
