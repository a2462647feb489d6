"""The zoo: names, facts, downloads that are whole or absent, a global config left alone."""

import http.server
import os
import socketserver
import subprocess
import sys
import threading

import pytest
import torch

import pycls.models
from pycls.core import config, io
from pycls.core.errors import UserError
from pycls.models import model_zoo


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files; counts requests; can cut each answer half-way."""

    cut, requests = False, 0

    def do_GET(self):
        type(self).requests += 1
        with open(self.translate_path(self.path), "rb") as f:
            data = f.read()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if self.cut else data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    """An HTTP server on loopback over tmp_path/www: (handler class, base URL)."""
    (tmp_path / "www").mkdir()

    class Mine(Handler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "www"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mine) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield Mine, f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_every_entry_has_a_config_and_a_distinct_address():
    names = pycls.models.get_model_list()
    infos = [pycls.models.get_model_info(name) for name in names]
    assert all(os.path.isfile(info["config"]) for info in infos)
    urls = [info["url"] for info in infos if info["url"]]
    assert len(urls) == len(set(urls)) == 36
    expected = "https://dl.fbaipublicfiles.com/pycls/dds_baselines/160906838/RegNetY-4.0GF_dds_8gpu.pyth"
    assert pycls.models.get_model_info("RegNetY-4.0GF")["url"] == expected


@pytest.mark.parametrize("frozen", [False, True])
def test_building_leaves_the_callers_config_alone(fresh_cfg, frozen):
    fresh_cfg.merge_from_list(["MODEL.TYPE", "vit", "OPTIM.STEPS", "[0, 3]"])
    if frozen:
        fresh_cfg.freeze()
    before = fresh_cfg.dump()
    model = pycls.models.regnetx("200MF", cfg_list=["MODEL.NUM_CLASSES", 7])
    assert model.head.fc.out_features == 7
    with pytest.raises(UserError):
        pycls.models.regnetx("200MF", cfg_list=["MODEL.NUM_CLASES", 7])
    assert fresh_cfg.dump() == before and fresh_cfg.is_frozen() == frozen


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(UserError, match="did you mean 4.0GF"):
        pycls.models.regnety("40GF")
    with pytest.raises(UserError, match="no weights were published"):
        pycls.models.vit("P-1.0GF", pretrained=True)


def test_pretrained_weights_come_over_http_once(fresh_cfg, server, tmp_path, monkeypatch):
    handler, url = server
    monkeypatch.setattr(model_zoo, "_URL", url)
    source = pycls.models.regnetx("200MF")
    entry = model_zoo._FAMILIES["regnetx"]["200MF"]
    path = tmp_path / "www" / entry.url[len(url) + 1 :]
    path.parent.mkdir(parents=True)
    torch.save({"model_state": source.state_dict(), "test_err": 31.0, "epoch": 99}, path)
    for _ in range(2):
        got = pycls.models.regnetx("200MF", pretrained=True, cfg_list=["DOWNLOAD_CACHE", str(tmp_path / "cache")])
        assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), got.state_dict().values()))
    assert handler.requests == 1


def test_a_cut_connection_leaves_nothing_and_says_what_to_do(server, tmp_path):
    handler, url = server
    (tmp_path / "www" / "w.pyth").write_bytes(b"x" * 100_000)
    handler.cut = True
    cache = str(tmp_path / "cache")
    with pytest.raises(UserError, match="50000 out of 100000 bytes") as error:
        io.cache_url(f"{url}/w.pyth", cache)
    target = str(error.value).split("put that file at ")[1].split(" by hand")[0]
    assert not [n for _, _, names in os.walk(cache) for n in names if not n.endswith(".lock")]
    handler.cut = False
    assert io.cache_url(f"{url}/w.pyth", cache) == target and os.path.getsize(target) == 100_000


def test_several_readers_at_once_download_once(server, tmp_path):
    handler, url = server
    (tmp_path / "www" / "w.pyth").write_bytes(os.urandom(300_000))
    paths, cache = [], str(tmp_path / "cache")
    threads = [threading.Thread(target=lambda: paths.append(io.cache_url(f"{url}/w.pyth", cache))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handler.requests == 1 and len(set(paths)) == 1 and len(paths) == 6


@pytest.mark.parametrize("processes", [1, 2])
def test_weights_by_url_are_tested_from_the_command_line(server, run_tool, tiny_run, tmp_path, processes):
    handler, url = server
    config.reset_cfg()
    config.load_cfg(str(tiny_run))
    from pycls.core.builders import build_model

    torch.save({"model_state": build_model().state_dict()}, tmp_path / "www" / "tiny.pyth")
    config.reset_cfg()
    done = run_tool("run_net.py", "--mode", "test", "--cfg", tiny_run, "OUT_DIR", tmp_path / "o", "NUM_GPUS", processes,
                    "DOWNLOAD_CACHE", tmp_path / "cache", "TEST.WEIGHTS", f"{url}/tiny.pyth")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "on 364 images" in done.stdout and handler.requests == 1


def test_the_zoos_page_is_current():
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "dev", "model_zoo.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
