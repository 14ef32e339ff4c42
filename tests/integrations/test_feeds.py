"""Clients from FedJAX and TFDS: real files, made here; fetched cohort by cohort under their own ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.data import feed, partition
from commjax.devices import host_clients
from commjax.integrations import fedjax as cj_fedjax
from commjax.integrations import tfds as cj_tfds

SIZES = {b"ann": 3, b"bob": 1, b"eve": 2}


def examples(name):
    rng = np.random.default_rng(list(name))
    return {"x": rng.standard_normal((SIZES[name], 2)), "y": rng.integers(0, 9, SIZES[name])}


def of_examples(rows=None):
    names = list(SIZES)

    def read(number, most):
        return {key: value[:most] for key, value in examples(names[number]).items()}

    return feed.make(names, list(SIZES.values()), read, rows)


def agrees(found, names, length=3):
    for i, name in enumerate(names):
        wanted, size = examples(name), min(SIZES[name], length)
        for key, value in wanted.items():
            assert found.rows[key].dtype == value.dtype and found.rows[key].shape[1] == length
            np.testing.assert_array_equal(found.rows[key][i, :size], value[:size])
            np.testing.assert_array_equal(found.rows[key][i, size:], np.repeat(value[:1], length - size, axis=0))
        np.testing.assert_array_equal(found.weights[i], [1 / size] * size + [0] * (length - size))


def test_a_cohort_has_a_client_axis_and_padding_of_no_weight():
    feed_ = of_examples()
    assert feed_.ids == (b"ann", b"bob", b"eve") and feed_.length == 3
    agrees(feed_.fetch(np.array([2, 0])), [b"eve", b"ann"])
    agrees(of_examples(rows=2).fetch(np.array([0, 1])), [b"ann", b"bob"], length=2)


def test_ids_are_kept_and_one_that_is_in_no_feed_is_refused():
    feed_ = of_examples()
    assert feed.numbers(feed_, [b"eve", b"ann"]).tolist() == [2, 0]
    with pytest.raises(ValueError, match="ids: b'zoe' is in no feed of these 3 clients"):
        feed.numbers(feed_, [b"ann", b"zoe"])
    for number in (-1, 3):
        with pytest.raises(ValueError, match=f"numbers: {number} is in no feed of 3 clients, from 0 to 2"):
            feed_.fetch(np.array([0, number]))


def test_bad_feeds_are_refused():
    with pytest.raises(ValueError, match="the feed has no clients"):
        feed.make([], [], lambda number, most: {})
    with pytest.raises(ValueError, match="two clients have the same name"):
        feed.make(["a", "a"], [1, 1], lambda number, most: {})
    with pytest.raises(ValueError, match="client 'b' has no rows"):
        feed.make(["a", "b"], [1, 0], lambda number, most: {})
    with pytest.raises(ValueError, match="rows must be at least 1"):
        of_examples(rows=0)


def test_a_federation_reads_its_cohorts_from_a_feed():
    feed_ = of_examples()

    def loss(x, data):
        error = data.rows["x"] @ x - data.rows["y"].astype(x.dtype)
        return data.weights @ error**2

    algorithm = ef_bv.ef_bv(jax.value_and_grad(loss), compressors.identity())
    many = host_clients.start(algorithm, jnp.zeros(2), 3)
    key = jax.random.key(0)
    _, metrics = host_clients.run(key, algorithm, ef_bv.HParams(0.05, 0.5, 1.0), many, feed_.fetch, 30, size=2)
    names = list(SIZES)
    first = [examples(names[i])["y"].astype(float) for i in host_clients.members(key, 0, 3, 2)]
    np.testing.assert_allclose(metrics.loss[0], np.mean([np.mean(y**2) for y in first]), rtol=1e-12)
    assert len(metrics.loss) == 30 and np.all(np.isfinite(metrics.loss))


RECORDS = [{"user": user, "x": np.full(2, i)} for i, user in enumerate([b"b", b"a", b"b", b"c", b"a"])]


def test_records_become_clients_by_a_feature_or_by_number():
    by_user = cj_tfds.clients(RECORDS, "user")
    assert by_user.ids == ("a", "b", "c") and by_user.length == 2
    assert by_user.fetch(np.array([1, 2])).rows["x"][..., 0].tolist() == [[0, 2], [3, 3]]
    by_number = cj_tfds.clients(RECORDS, partition.blocks(5, 2, seed=0))
    assert by_number.ids == (0, 1)
    seen = by_number.fetch(np.array([0, 1]))
    assert sorted(seen.rows["x"][..., 0][seen.weights > 0].tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"of: no feature 'who' in the records; there are \['user', 'x'\]"):
        cj_tfds.clients(RECORDS, "who")
    for number in (5, -1):
        with pytest.raises(ValueError, match=f"of: record {number} is not one of the 5 of the source"):
            cj_tfds.clients(RECORDS, [np.array([0, number])])
    with pytest.raises(ValueError, match="records: the source has none"):
        cj_tfds.clients([], "user")
    with pytest.raises(ValueError, match=r"records: no feature of \['user'\] besides 'user' has numbers"):
        cj_tfds.clients([{"user": b"a"}], "user")
    with pytest.raises(ValueError, match="numbers: the cohort is empty"):
        by_user.fetch(np.zeros(0, np.int32))


def test_only_numbers_reach_a_program():
    records = [
        {"user": 3, "text": "hello", "raw": b"x", "flag": True, "x": np.ones(2)},
        {"user": 4, "text": "", "raw": b"", "flag": False, "x": np.zeros(2)},
    ]
    cohort = cj_tfds.clients(records, "user").fetch(np.array([0, 1]))
    assert set(cohort.rows) == {"flag", "x"}
    assert jax.jit(lambda cohort: cohort.rows["x"].sum())(cohort) == 2.0
    assert set(cj_tfds.clients(records, [np.array([0, 1])]).fetch(np.array([0])).rows) == {"user", "flag", "x"}


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] in ("fedjax", "tensorflow_datasets"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'commjax\[fedjax\]'"):
        cj_fedjax.sqlite(tmp_path / "file")
    with pytest.raises(ImportError, match=r"pip install 'commjax\[data\]'"):
        cj_tfds.source("mnist", "train")


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore")  # FedJAX's and TFDS's own
def test_fedjax_s_sqlite_file_is_read_cohort_by_cohort(tmp_path):
    pytest.importorskip("fedjax")
    from fedjax.core import in_memory_federated_data, sqlite_federated_data

    path = tmp_path / "clients.sqlite"
    with sqlite_federated_data.SQLiteFederatedDataBuilder(str(path)) as builder:
        builder.add_many((name, examples(name)) for name in SIZES)
    found = cj_fedjax.sqlite(path)
    assert set(found.ids) == set(SIZES) and found.length == 3
    agrees(found.fetch(feed.numbers(found, [b"eve", b"bob"])), [b"eve", b"bob"])
    agrees(cj_fedjax.sqlite(path, rows=2).fetch(feed.numbers(found, [b"ann"])), [b"ann"], length=2)
    memory = in_memory_federated_data.InMemoryFederatedData({name: examples(name) for name in SIZES})
    agrees(cj_fedjax.clients(memory).fetch(np.arange(3)), sorted(SIZES))
    with pytest.raises(ValueError, match="there is no file"):
        cj_fedjax.sqlite(tmp_path / "none")


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore")
def test_a_tfds_data_set_on_disk_becomes_clients(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")

    class Speakers(tfds.core.GeneratorBasedBuilder):
        """Made here."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"user": tfds.features.Text(), "x": tfds.features.Tensor(shape=(2,), dtype=np.float32)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i, record in enumerate(RECORDS):
                yield i, {"user": record["user"].decode(), "x": record["x"].astype(np.float32)}

    builder = Speakers(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    records = builder.as_data_source("train")
    found = cj_tfds.clients(records, "user")
    assert found.ids == ("a", "b", "c")
    cohort = found.fetch(feed.numbers(found, ["c", "b"]))
    assert cohort.rows["x"].shape == (2, 2, 2) and cohort.weights.tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert sorted(cohort.rows["x"][1, :, 0].tolist()) == [0.0, 2.0]
    again = cj_tfds.source("speakers", "train", tmp_path)
    assert len(again) == len(records) == 5
