"""A real data set that needs no download."""

import numpy as np

from commjax.data.libsvm import Dataset


def breast_cancer() -> Dataset:
    """scikit-learn's breast cancer set, 569 x 30; every feature has mean 0 and variance 1, benign is +1.

    >>> breast_cancer().features.shape
    (569, 30)
    """
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        raise ImportError("breast_cancer needs scikit-learn: pip install 'commjax[data]'") from error
    raw, target = (np.asarray(part) for part in load_breast_cancer(return_X_y=True))
    features = (raw - raw.mean(axis=0)) / raw.std(axis=0)
    return Dataset(features, np.where(target == 1, 1.0, -1.0), "breast_cancer")
