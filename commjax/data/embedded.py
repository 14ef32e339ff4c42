"""Real data sets that need no download."""

import numpy as np

from commjax.data import partition
from commjax.data.images import Images
from commjax.data.libsvm import Dataset


def breast_cancer() -> Dataset:
    """Load scikit-learn's breast cancer set: 569 rows, 30 features.

    Returns:
        The data set. Every feature has mean 0 and variance 1; the label +1 is benign.

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


def digits() -> Images:
    """Load scikit-learn's 1797 handwritten digits as 8 x 8 x 1 images.

    Returns:
        The images. 80 % of each class are the training part, the other rows are the test part.

    >>> digits().train.shape, digits().test.shape
    ((1438, 8, 8, 1), (359, 8, 8, 1))
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits needs scikit-learn: pip install 'commjax[data]'") from error
    raw, target = (np.asarray(part) for part in load_digits(return_X_y=True))
    images, labels = (raw.reshape(-1, 8, 8, 1) / 16).astype(np.float32), target.astype(np.int32)
    _, classes = partition.by_group(labels)
    train, test = (np.sort(np.concatenate(part)) for part in partition.holdout(classes, 0.2))
    return Images(images[train], labels[train], images[test], labels[test])
