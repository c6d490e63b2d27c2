"""What is known of a launch by Ray before Ray is started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import sys
import threading
import types
from pathlib import Path

import pytest

from distributed.backends import make_backend
from distributed.backends._ray import joining
from distributed.backends._ray.cluster import Cluster, check_cpus, check_placement
from distributed.backends._ray.starting import _connected
from distributed.backends.ddp import DDPBackend
from distributed.backends.fsdp import FSDPBackend
from distributed.config.merging import Overrides, merge
from distributed.config.plan import ProcessPlan
from distributed.config.registry import backend_row, groups_in_use, missing_libraries
from distributed.errors import ConfigError, ResourceError
from distributed.launching.listening import reachable_address
from distributed.launching.request import LaunchRequest
from tests.conftest import needs_backend


def make(**settings):
    merged = merge(Overrides(), {"backend": "ray", **settings})
    return make_backend(merged, ProcessPlan(1, 2, "cpu", "ray")), merged.config


@pytest.fixture(autouse=True)
def _ray():
    needs_backend("ray")


@pytest.mark.parametrize(("engine", "kind"), [("pytorch-ddp", DDPBackend), ("fsdp", FSDPBackend)])
def test_the_engine_chooses_the_step_and_whose_options_count(engine, kind):
    backend, config = make(ray={"engine": engine}, fsdp={"reshard_after_forward": False}, ddp={"static_graph": True})
    assert isinstance(backend, kind)
    assert groups_in_use(config, "ray") == ("ray", backend_row(engine).group)
    assert backend.options == config.options(backend_row(engine).group)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_nodes": 2}, "num_nodes=2 does not work with backend='ray': Ray chooses the nodes"),
        ({"master_addr": "here"}, "master_addr='here' does not work with backend='ray': Ray chooses where rank 0 runs"),
        ({"gpus_per_node": 2}, "gpus_per_node=2 does not work with backend='ray': Ray chooses the nodes"),
        (
            {"ray": {"report_to_tune": True}},
            "ray.report_to_tune=True works in a trial of Ray Tune only, and this is not one: drop",
        ),
    ],
)
def test_what_ray_decides_is_refused(settings, said):
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    assert said in str(caught.value)


def test_an_address_is_for_ray_alone():
    assert make(address="head:6379")[0].config.address == "head:6379"
    with pytest.raises(ConfigError, match="address='head:6379' does not work with backend='pytorch-ddp'"):
        make_backend(merge(Overrides(), {"address": "head:6379"}), ProcessPlan(1, 2, "cpu", "pytorch-ddp"))


@pytest.mark.parametrize(
    ("processes", "cpus", "there", "said"),
    [
        (3, 1.0, 2.0, "nproc_per_node=3 with ray.cpus_per_worker=1 needs 3 CPUs, but here has 2: set nproc_per_node=2"),
        (3, 0.9, 2.0, "or ray.cpus_per_worker=0.666"),
        (1, 4.0, 2.0, "ray.cpus_per_worker=4 is more than the 2 CPUs of here: set it to 2"),
    ],
)
def test_too_few_cpus_are_said_with_a_number_that_works(processes, cpus, there, said):
    with pytest.raises(ResourceError) as caught:
        check_cpus(processes, cpus, there, "here")
    assert said in str(caught.value)


@pytest.mark.parametrize(("processes", "cpus"), [(2, 1.0), (3, 0.666), (1, 2.0)])
def test_what_fits_passes(processes, cpus):
    check_cpus(processes, cpus, 2.0, "here")


def test_an_address_is_tried_and_words_are_rays_own():
    with answering(b"\0\0\0\4\0\0\0\0\0") as port:  # as the server of an HTTP/2 connection begins
        check_placement(f"127.0.0.1:{port}", 100, 1.0)
        check_placement(f"ray://127.0.0.1:{port}", 100, 1.0)
    check_placement("auto", 100, 1.0)
    with pytest.raises(ResourceError, match=f"'127.0.0.1:{port}' does not answer"):
        check_placement(f"127.0.0.1:{port}", 1, 1.0)


def test_a_host_that_nobody_knows_and_an_address_without_a_port_are_named():
    with pytest.raises(ResourceError, match=r"'no-such-host.invalid:6379' names no host that this machine knows"):
        check_placement("no-such-host.invalid:6379", 1, 1.0)
    for address, like in (
        ("head", "head:6379, ray://head:10001 or auto"),
        ("head:", "head:6379, ray://head:10001 or auto"),
        ("head:port", "head:6379, ray://head:10001 or auto"),
        ("head:70000", "head:6379, ray://head:10001 or auto"),
        ("http://head:8265", "head:6379, ray://head:10001 or auto"),
        ("ray://head", "ray://head:10001"),  # Ray itself waits a minute and a half for it
    ):
        with pytest.raises(ConfigError) as caught:
            check_placement(address, 1, 1.0)
        assert (
            str(caught.value)
            == f"address={address!r} is not of the form HOST:PORT or ray://HOST:PORT: set it to {like}"
        )


def test_auto_without_a_cluster_names_what_to_do(monkeypatch):
    def init(*address, **options):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))
    monkeypatch.setattr(joining, "_pids", list)
    monkeypatch.setattr("os.environ", {**os.environ, "RAY_TMPDIR": "/nowhere"})
    for address, said in (
        ("auto", "start one with 'ray start --head'"),
        ("here:1", "could not be joined (Could not find"),
    ):
        cluster = Cluster(LaunchRequest("run", launcher_options={"address": address, "cpus": 1.0}))
        with pytest.raises(ResourceError, match=re.escape(said)):
            cluster.connect(0)


def test_addresses_of_ipv6_are_tried_too():
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    assert reachable_address("::1") == "::1"
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
    with pytest.raises(ResourceError, match="does not answer"):  # and not: names no host
        check_placement(f"[::1]:{port}", 1, 1.0)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n", b""])
def test_another_service_behind_an_address_is_not_waited_for(answer):
    with answering(answer) as port, pytest.raises(ResourceError, match="is not an address of Ray: name the port"):
        check_placement(f"127.0.0.1:{port}", 1, 1.0)


@contextlib.contextmanager
def answering(data):
    """The port of a server that says `data` to everybody and hangs up."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(64):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_the_launcher_is_found_where_the_cluster_is():
    assert reachable_address(None) == reachable_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:6379", "10.0.0.5"), ("auto", "10.0.0.5"), ("ray://localhost:10001", "10.0.0.5"),
        ("ray://head.example:10001", "head.example"),
    ],
)  # fmt: skip
def test_workers_of_other_nodes_are_not_sent_to_their_own_loopback(address, host):
    cluster = Cluster(LaunchRequest("run", launcher_options={"address": address, "cpus": 1.0}))
    cluster._ray = types.SimpleNamespace(get_runtime_context=lambda: types.SimpleNamespace(gcs_address="10.0.0.5:6379"))
    assert cluster.host == host


def test_a_client_of_a_cluster_joins_it_as_a_client(monkeypatch):
    """Starting Ray's client server takes a minute on a busy machine: what is taken from the client is looked for in its code."""
    worker = types.SimpleNamespace(_conn_str="head.example:10001")
    assert "self._conn_str = conn_str" in Path(importlib.util.find_spec("ray.util.client.worker").origin).read_text()
    client = types.SimpleNamespace(
        is_connected=lambda: True, get_context=lambda: types.SimpleNamespace(client_worker=worker)
    )
    monkeypatch.setitem(sys.modules, "ray.util.client", types.SimpleNamespace(ray=client))
    assert _connected() == "ray://head.example:10001"


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ResourceError, match=r"pip install 'distributed-trainer\[ray\]'"):
        make()
    assert "ray" in missing_libraries(backend_row("ray"))


def joined_by_auto(monkeypatch, tmp_path, processes=()):
    """The address that Ray is given for `auto`. `processes`: (user, words of its command line)."""
    given = []
    for number, (user, words) in enumerate(processes):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "cmdline").write_text("\0".join(words))
        os.chown(tmp_path / f"{number}", user, user)
    monkeypatch.setattr(joining, "_pids", lambda: [tmp_path / f"{number}" for number in range(len(processes))])
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    joining.join(types.SimpleNamespace(init=lambda address, **_: given.append(address)), "auto")
    return given[0]


def raylet(port):
    return "/ray/raylet", f"--gcs-address=here:{port}", "--node_id=1"


@pytest.fixture
def written(tmp_path):
    """The file in which `ray start` leaves the address of a head, in a directory as Ray makes it."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray").chmod(0o777)
    (tmp_path / "ray" / "ray_current_cluster").write_text("here:1")
    return tmp_path / "ray" / "ray_current_cluster"


def test_auto_is_the_cluster_that_this_user_started(monkeypatch, tmp_path, written):
    assert joined_by_auto(monkeypatch, tmp_path) == "here:1"
    monkeypatch.setenv("RAY_ADDRESS", "there:1")
    given = []
    joining.join(types.SimpleNamespace(init=lambda address, **_: given.append(address)), "auto")
    assert given == ["there:1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_auto_is_no_cluster_that_another_user_offers(monkeypatch, tmp_path, written):
    processes = [(65534, raylet(2)), (0, raylet(3)), (0, ["python", "--gcs-address=here:4"])]
    assert joined_by_auto(monkeypatch, tmp_path, processes) == "here:3"
    monkeypatch.setattr(joining, "_pids", lambda: [tmp_path / "0", tmp_path / "2"])
    assert joining._own_cluster() == "here:1"
    for mode, user in ((0o666, 0), (0o644, 65534)):
        written.chmod(mode)
        os.chown(written, user, user)
        with pytest.raises(ConnectionError, match="that this user or root has started"):
            joining._own_cluster()
    written.rename(tmp_path / "elsewhere")
    os.chown(tmp_path / "elsewhere", 0, 0)
    written.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConnectionError, match="that this user or root has started"):
        joining._own_cluster()
