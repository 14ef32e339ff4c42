"""Downloads from a real server on the loopback: whole and checked, or not there at all."""

import bz2
import hashlib
import http.server
import os
import threading

import pytest

from commjax.data import download, libsvm

TEXT = b"1 1:1\n-1 2:1\n" * 20_000
SHA = hashlib.sha256(TEXT).hexdigest()
FILES = {
    "/plain": TEXT,
    "/packed.bz2": bz2.compress(TEXT),
    "/ijcnn1.t.bz2": bz2.compress(TEXT),
    "/mushrooms": TEXT,
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(TEXT)))
            self.end_headers()
            self.wfile.write(TEXT[:100])
        elif self.path in FILES:
            self.send_response(200)
            self.send_header("Content-Length", str(len(FILES[self.path])))
            self.end_headers()
            self.wfile.write(FILES[self.path])
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["plain", "packed.bz2"])
@pytest.mark.parametrize("sha256", [SHA, None])
def test_a_file_arrives_whole_and_alone(server, tmp_path, name, sha256):
    path = download.fetch(f"{server}/{name}", tmp_path / "new" / name, sha256)
    assert path.read_bytes() == FILES[f"/{name}"]
    assert os.listdir(path.parent) == [name]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["plain", "packed.bz2"])
def test_a_wrong_hash_leaves_nothing_and_names_both_hashes(server, tmp_path, name):
    with pytest.raises(ValueError) as error:
        download.fetch(f"{server}/{name}", tmp_path / name, "0" * 64)
    for part in (f"{server}/{name}", "0" * 64, SHA):
        assert part in str(error.value)
    assert os.listdir(tmp_path) == []


def test_a_file_that_does_not_unpack_is_a_wrong_hash(server, tmp_path):
    with pytest.raises(ValueError, match=r"does not unpack as \.xz"):
        download.fetch(f"{server}/plain", tmp_path / "plain.xz", SHA)
    assert os.listdir(tmp_path) == []


def test_a_failed_download_keeps_the_older_file(server, tmp_path):
    (tmp_path / "plain").write_text("older")
    with pytest.raises(ValueError):
        download.fetch(f"{server}/plain", tmp_path / "plain", "0" * 64)
    assert (tmp_path / "plain").read_text() == "older"


@pytest.mark.parametrize(("name", "reason"), [("cut", "got 100 of"), ("missing", "HTTP 404")])
def test_a_bad_answer_names_the_url_and_the_way_without_a_network(server, tmp_path, name, reason):
    with pytest.raises(ConnectionError) as error:
        download.fetch(f"{server}/{name}", tmp_path / name)
    for part in (f"{server}/{name}", reason, "COMMJAX_DATA"):
        assert part in str(error.value)
    assert os.listdir(tmp_path) == []


def test_offline_names_the_url_and_the_way_without_a_network(tmp_path):
    def offline(url):
        raise OSError("network is unreachable")

    with pytest.raises(ConnectionError, match=r"http://nowhere/x: .*unreachable.*COMMJAX_DATA"):
        download.fetch("http://nowhere/x", tmp_path / "x", opener=offline)
    assert os.listdir(tmp_path) == []


def test_load_downloads_once_into_the_cache(server, tmp_path, monkeypatch):
    monkeypatch.delenv("COMMJAX_DATA", raising=False)
    first = libsvm.load("ijcnn1.t", cache=tmp_path, url=server)
    assert first.features.shape == (40_000, 22)
    assert os.listdir(tmp_path) == ["ijcnn1.t.bz2"]
    again = libsvm.load("ijcnn1.t", cache=tmp_path, url="http://127.0.0.1:9/")
    assert (again.features == first.features).all()


def test_load_refuses_a_known_set_with_other_bytes(server, tmp_path, monkeypatch):
    monkeypatch.delenv("COMMJAX_DATA", raising=False)
    with pytest.raises(ValueError, match=download.TEXT_SHA256["mushrooms"]):
        libsvm.load("mushrooms", cache=tmp_path, url=server + "/")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif("COMMJAX_DATA" not in os.environ, reason="COMMJAX_DATA names no data folder")
@pytest.mark.parametrize("name", download.TEXT_SHA256)
def test_the_data_folder_holds_the_texts_of_the_hash_table(name):
    folders = [os.environ["COMMJAX_DATA"], os.path.join(os.environ["COMMJAX_DATA"], "libsvm")]
    paths = [os.path.join(f, name + s) for f in folders for s in ("", *download.PACKED_SUFFIXES)]
    path = next(filter(os.path.isfile, paths))
    assert download.sha256_of_text(path) == download.TEXT_SHA256[name]
