"""Find the file of a LIBSVM data set: a path, the user's folder, the cache, or the LIBSVM site."""

import os
import re
from pathlib import Path

from commjax.data import bounded, download, libsvm_text

NUM_FEATURES = (
    {"mushrooms": 112, "phishing": 68, "ijcnn1": 22}
    | {f"a{i}a": 123 for i in range(1, 10)}
    | {f"w{i}a": 300 for i in range(1, 9)}
)
_DATASET_NAME = re.compile(r"\w[\w.\-]*")


def _find(folder: Path, name: str) -> Path | None:
    for suffix in ("", *reversed(bounded.PACKED_SUFFIXES)):
        if (path := folder / (name + suffix)).is_file():
            return path
    return None


def locate(
    name: str | os.PathLike,
    *,
    folder: str | os.PathLike | None = None,
    cache: str | os.PathLike | None = None,
    url: str = download.LIBSVM_URL,
    n_features: int | None = None,
    trust_first_use: bool = False,
) -> tuple[Path, int | None]:
    """Find the file, and its number of features if that is known.  The arguments are those of ``libsvm.load``."""
    path: Path | None = Path(name)
    if not path.is_file():
        name = str(name)
        if not _DATASET_NAME.fullmatch(name):
            raise ValueError(f"load: {name!r} is no file; allowed: an existing path, or a name such as 'mushrooms'")
        cache = Path(cache or os.environ.get("COMMJAX_CACHE") or Path.home() / ".cache" / "commjax")
        folder = folder or os.environ.get("COMMJAX_DATA")
        places = [Path(folder), Path(folder, "libsvm")] if folder else []
        path = next(filter(None, (_find(place, name) for place in places)), None)
        if path is None:
            path = _cached(name, cache, url, trust_first_use or os.environ.get(download.TRUST) == "1")
    if n_features is None:
        n_features = NUM_FEATURES.get(path.name.split(".")[0])
    return path, n_features


def _cached(name: str, cache: Path, url: str, trust_first_use: bool) -> Path:
    """The checked file in the cache; it is downloaded if it is not there."""
    known = download.TEXT_SHA256.get(name)
    path = _find(cache, name)
    if path is not None:
        download.check_cached(path, known, trust_first_use=trust_first_use)
        return path
    remote = name + ".bz2" if name.startswith("ijcnn1") else name
    source = f"{url.rstrip('/')}/{remote}"
    return download.fetch(
        source, cache / remote, known, trust_first_use=trust_first_use, accept=libsvm_text.check_first_row
    )
