"""Data sets and their partition among clients. Everything runs on the host, in NumPy."""

from commjax.data import download, embedded, libsvm, partition, stacked
from commjax.data.libsvm import Dataset
from commjax.data.stacked import ClientData

__all__ = ["ClientData", "Dataset", "download", "embedded", "libsvm", "partition", "stacked"]
