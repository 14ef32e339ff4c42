"""Downloads from a real server on the loopback: whole and checked, within limits, or not there at all."""

import bz2
import hashlib
import http.server
import os
import threading
import time

import pytest

from commjax.data import bounded, download, libsvm

pytestmark = pytest.mark.slow

TEXT = b"1 1:1\n-1 2:1\n" * 20_000
SHA = hashlib.sha256(TEXT).hexdigest()
FILES = {
    "/plain": TEXT,
    "/packed.bz2": bz2.compress(TEXT),
    "/ijcnn1.t.bz2": bz2.compress(TEXT),
    "/mushrooms": TEXT,
    "/other": TEXT,
    "/page": b"<html>Please log in</html>",
}
ANNOUNCED = {"/announced": "1" + "0" * 20, "/nonsense": "many"}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(TEXT)))
            self.end_headers()
            self.wfile.write(TEXT[:100])
        elif self.path in ANNOUNCED:
            self.send_response(200)
            self.send_header("Content-Length", ANNOUNCED[self.path])
            self.end_headers()
            self.wfile.write(b"1 1:1\n")
        elif self.path in ("/endless", "/slow"):
            self.send_response(200)
            self.end_headers()
            self.pour(TEXT if self.path == "/endless" else b"1", 0.0 if self.path == "/endless" else 0.05)
        elif self.path == "/slow-headers":
            self.pour(b"H", 0.05)
        elif self.path in FILES:
            self.send_response(200)
            self.send_header("Content-Length", str(len(FILES[self.path])))
            self.end_headers()
            self.wfile.write(FILES[self.path])
        else:
            self.send_error(404)

    def pour(self, data, pause):
        """Until the client goes, 20 seconds at most."""
        ends = time.monotonic() + 20
        try:
            while time.monotonic() < ends:
                self.wfile.write(data)
                time.sleep(pause)
        except OSError:
            self.close_connection = True

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
def test_a_file_arrives_whole_and_alone(server, tmp_path, name):
    path = download.fetch(f"{server}/{name}", tmp_path / "new" / name, SHA)
    assert path.read_bytes() == FILES[f"/{name}"]
    assert os.listdir(path.parent) == [name]
    assert path.stat().st_mode & 0o777 == 0o644


def test_without_a_sha256_nothing_is_downloaded_unless_the_first_use_is_trusted(server, tmp_path, capsys):
    with pytest.raises(
        ValueError, match=r"/plain: no sha256 is known; allowed: sha256=\.\.\., or trust_first_use=True"
    ):
        download.fetch(f"{server}/plain", tmp_path / "plain")
    assert os.listdir(tmp_path) == [] and capsys.readouterr().err == ""
    download.fetch(f"{server}/packed.bz2", tmp_path / "packed.bz2", trust_first_use=True)
    assert capsys.readouterr().err == (
        f"commjax: no sha256 of {server}/packed.bz2 is known; {SHA} is kept in {tmp_path}/packed.bz2.sha256\n"
    )
    assert (tmp_path / "packed.bz2.sha256").read_text() == f"{SHA}\n"
    download.check_cached(tmp_path / "packed.bz2")
    (tmp_path / "packed.bz2").write_bytes(bz2.compress(b"1 1:2\n"))
    with pytest.raises(
        ValueError, match=rf"packed\.bz2: expected sha256 {SHA} of the unpacked text, got .*; remove it"
    ):
        download.check_cached(tmp_path / "packed.bz2", trust_first_use=True)


LIMITS = {
    "endless": (ValueError, r"/endless sends \d+ bytes or more; allowed: most=1000000 bytes"),
    "announced": (ValueError, r"/announced sends 1(0{20}) bytes or more; allowed: most=1000000 bytes"),
    "slow": (ConnectionError, r"/slow: it took longer than deadline=0\.5 seconds \(\d+ bytes came\)"),
    "slow-headers": (ConnectionError, r"/slow-headers: it took longer than deadline=0\.5 seconds \(0 bytes came\)"),
    "page": (ValueError, "sha256"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_download_ends_by_size_and_time(server, tmp_path, name):
    kind, message = LIMITS[name]
    began = time.monotonic()
    with pytest.raises(kind, match=message):
        download.fetch(f"{server}/{name}", tmp_path / name, SHA, most=10**6, deadline=0.5 if "slow" in name else 20.0)
    assert os.listdir(tmp_path) == [] and time.monotonic() - began < 10


def test_a_length_that_is_no_number_is_no_length(server, tmp_path):
    path = download.fetch(f"{server}/nonsense", tmp_path / "x", hashlib.sha256(b"1 1:1\n").hexdigest())
    assert path.read_bytes() == b"1 1:1\n"


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
        download.fetch(f"{server}/{name}", tmp_path / name, SHA)
    for part in (f"{server}/{name}", reason, "COMMJAX_DATA"):
        assert part in str(error.value)
    assert os.listdir(tmp_path) == []


def test_offline_names_the_url_and_the_way_without_a_network(tmp_path):
    def offline(url):
        raise OSError("network is unreachable")

    with pytest.raises(ConnectionError, match=r"http://nowhere/x: .*unreachable.*COMMJAX_DATA"):
        download.fetch("http://nowhere/x", tmp_path / "x", SHA, opener=offline)
    assert os.listdir(tmp_path) == []


def test_load_downloads_once_into_the_cache_and_checks_it_at_each_use(server, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COMMJAX_DATA", raising=False)
    monkeypatch.delenv(download.TRUST, raising=False)
    with pytest.raises(ValueError, match=r"/ijcnn1\.t\.bz2: no sha256 is known; allowed: .*COMMJAX_TRUST_FIRST_USE=1"):
        libsvm.load("ijcnn1.t", cache=tmp_path, url=server)
    first = libsvm.load("ijcnn1.t", cache=tmp_path, url=server, trust_first_use=True)
    assert first.features.shape == (40_000, 22)
    assert sorted(os.listdir(tmp_path)) == ["ijcnn1.t.bz2", "ijcnn1.t.bz2.sha256"]
    again = libsvm.load("ijcnn1.t", cache=tmp_path, url="http://127.0.0.1:9/")
    assert (again.features == first.features).all() and capsys.readouterr().err.count("\n") == 1
    path = tmp_path / "ijcnn1.t.bz2"
    path.write_bytes(bz2.compress(TEXT.replace(b"2:1", b"3:1", 1)))
    with pytest.raises(ValueError, match=r"ijcnn1\.t\.bz2: expected sha256"):
        libsvm.load("ijcnn1.t", cache=tmp_path, url=server)
    (tmp_path / "mushrooms").write_bytes(TEXT)  # known, and another
    with pytest.raises(ValueError, match=f"mushrooms: expected sha256 {download.TEXT_SHA256['mushrooms']}"):
        libsvm.load("mushrooms", cache=tmp_path, url=server, trust_first_use=True)
    (tmp_path / "old").write_bytes(TEXT)  # cached before sha256 were kept
    with pytest.raises(ValueError, match=r"old: no sha256 of this cached file is known; allowed: trust_first_use=True"):
        libsvm.load("old", cache=tmp_path, url=server)


def test_a_page_of_a_proxy_is_not_cached(server, tmp_path, monkeypatch):
    monkeypatch.delenv("COMMJAX_DATA", raising=False)
    with pytest.raises(ValueError, match="the download, line 1: the line does not parse"):
        libsvm.load("page", cache=tmp_path, url=server, trust_first_use=True)
    assert os.listdir(tmp_path) == []


def test_load_refuses_a_known_set_with_other_bytes(server, tmp_path, monkeypatch):
    monkeypatch.delenv("COMMJAX_DATA", raising=False)
    with pytest.raises(ValueError, match=download.TEXT_SHA256["mushrooms"]):
        libsvm.load("mushrooms", cache=tmp_path, url=server + "/")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif("COMMJAX_DATA" not in os.environ, reason="COMMJAX_DATA names no data folder")
@pytest.mark.parametrize("name", download.TEXT_SHA256)
def test_the_data_folder_holds_the_texts_of_the_hash_table(name):
    folders = [os.environ["COMMJAX_DATA"], os.path.join(os.environ["COMMJAX_DATA"], "libsvm")]
    paths = [os.path.join(f, name + s) for f in folders for s in ("", *bounded.PACKED_SUFFIXES)]
    path = next(filter(os.path.isfile, paths))
    assert download.sha256_of_text(path) == download.TEXT_SHA256[name]
