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

from distributed import Trainer
from distributed.backends import groups_in_use, make_backend, plan_of, starting_of
from distributed.backends._ray import joining
from distributed.backends._ray.cluster import LONGEST_S, Cluster, check_placement, start_own
from distributed.backends._ray.joining import connected
from distributed.backends._ray.resources import RayNode, Workers, check_cpus, missing, nodes_of
from distributed.backends.ddp import DDPBackend
from distributed.backends.fsdp import FSDPBackend
from distributed.config.merging import Overrides, merge
from distributed.config.plan import ProcessPlan
from distributed.config.registry import backend_entry, missing_libraries
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
    assert groups_in_use(config, "ray") == ("ray", backend_entry(engine).group)
    assert backend.options == config.options(backend_entry(engine).group)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_nodes": 2}, "num_nodes=2 does not work with backend='ray' without a cluster to join: set address"),
        (
            {"num_nodes": 2, "node_rank": 1, "address": "head:6379"},
            "node_rank=1 does not work with backend='ray': one command starts the workers of all nodes: drop it",
        ),
        ({"master_addr": "here"}, "master_addr='here' does not work with backend='ray': Ray chooses where rank 0 runs"),
        (
            {"num_nodes": 2, "address": "head:6379", "ray": {"callbacks": "module.Class"}},
            "ray.callbacks are called by Ray Train, which num_nodes=2 does not use: drop one of them",
        ),
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


def node(name, gpus, cpus=16.0, *, alive=True, address="10.0.0.1"):
    """A node in the form of `ray.nodes()`."""
    return {
        "NodeID": f"id of {name}", "NodeManagerHostname": name, "NodeManagerAddress": address, "Alive": alive,
        "Resources": {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})},
    }  # fmt: skip


@pytest.fixture
def cluster_of(monkeypatch):
    """Return a function that plans on a cluster of these nodes, from a client without a GPU. No cluster is needed."""
    from distributed.backends._ray import starting
    from distributed.config import plan

    monkeypatch.setattr(plan, "visible_gpus", lambda: 0)
    monkeypatch.setattr(starting, "check_address", lambda address: None)

    def planned(nodes, **settings):
        monkeypatch.setattr(starting, "ask", lambda address, patience_s: nodes)
        config = merge(Overrides(), {"backend": "ray", "address": "ray://head:10001", **settings}).config
        return plan_of(config)

    return planned


FOUR = [node(f"node{number}", 8) for number in range(4)]


@pytest.mark.parametrize(
    ("nodes", "settings", "plan"),
    [
        (FOUR, {"num_nodes": 4, "gpus_per_node": 8}, (4, 8, "cuda")),
        (FOUR, {"nproc_per_node": 32}, (1, 32, "cuda")),
        (FOUR, {"num_gpus": 32}, (1, 32, "cuda")),
        (FOUR, {"num_gpus": 16, "num_nodes": 2}, (2, 8, "cuda")),
        (FOUR, {}, (1, 32, "cuda")),  # as on one machine: the GPUs that are there
        (FOUR, {"num_nodes": 2}, (2, 8, "cuda")),
        ([node("a", 8), node("b", 4)], {"num_nodes": 2}, (2, 4, "cuda")),
        (FOUR, {"nproc_per_node": 32, "device": "cpu"}, (1, 32, "cpu")),
        ([node("head", 0)], {"nproc_per_node": 16}, (1, 16, "cpu")),
        ([node("head", 0)], {}, (1, 1, "cpu")),
        ([*FOUR[:3], node("late", 8, alive=False)], {"num_nodes": 4, "gpus_per_node": 8, "wait": True}, (4, 8, "cuda")),
    ],
)
def test_the_gpus_of_the_cluster_count_and_not_those_of_the_client(cluster_of, nodes, settings, plan):
    assert cluster_of(nodes, **settings) == ProcessPlan(*plan, "ray")


@pytest.mark.parametrize(
    ("nodes", "settings", "said"),
    [
        (
            [*FOUR[:2], node("node2", 4)],
            {"num_nodes": 4, "gpus_per_node": 8},
            "num_nodes=4 needs as many nodes with 8 GPUs and 8 CPUs, but the Ray cluster at ray://head:10001 has 2 (node0: 8 GPUs, 16 CPUs;"
            " node1: 8 GPUs, 16 CPUs; node2: 4 GPUs, 16 CPUs): set other numbers, or wait for more with --wait SECONDS",
        ),
        (
            [node("head", 0)],
            {"gpus_per_node": 2},
            "nproc_per_node=2 needs as many GPUs, but the Ray cluster at ray://head:10001 has none (head: 16 CPUs): set --device cpu,",
        ),
        (
            FOUR[:1],
            {"nproc_per_node": 32},
            "has 8 (node0: 8 GPUs, 16 CPUs): set nproc_per_node=8, or --device cpu, or wait",
        ),
        (
            [node("cpus", 0, 64), node("gpus", 8, 2)],
            {"num_gpus": 8},
            "8 workers with 1 CPU and 1 GPU each do not fit on the nodes of the Ray cluster at ray://head:10001 (cpus: 64 CPUs; gpus:"
            " 8 GPUs, 2 CPUs): set nproc_per_node=2,",
        ),
        ([node("head", 2, 1)], {"num_gpus": 2}, "needs 2 CPUs, but the Ray cluster at ray://head:10001 has 1: set"),
        (
            [node("same", 1, address="10.0.0.1"), node("same", 1, address="10.0.0.2")],
            {"num_gpus": 3},
            "has 2 (10.0.0.1: 1 GPU, 16 CPUs; 10.0.0.2: 1 GPU, 16 CPUs)",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_what_is_there(cluster_of, nodes, settings, said):
    with pytest.raises(ResourceError) as caught:
        cluster_of(nodes, **settings)
    assert said in str(caught.value)


def test_a_cluster_of_many_nodes_is_listed_in_one_line():
    lack = missing(Workers(1, 99, 1.0, True), nodes_of(node(f"node{each}", 1) for each in range(20)), "here")
    assert lack is not None and "node7: 1 GPU, 16 CPUs; 12 more nodes)" in lack.what and "\n" not in lack.what
    assert missing(Workers(1, 20, 1.0, True), [RayNode("", "", 1.0, 1.0)] * 20, "here") is None


def test_a_wait_belongs_to_a_cluster():
    with pytest.raises(ConfigError, match=r"wait=5.0 does not work with backend='pytorch-ddp': no cluster is joined"):
        make_backend(merge(Overrides(), {"wait": 5}), ProcessPlan(1, 2, "cpu", "pytorch-ddp"))
    for wait, seconds in ((True, LONGEST_S), (20, 20.0), (False, 0.0)):
        config = merge(Overrides(), {"backend": "ray", "address": "auto", "wait": wait}).config
        options = starting_of("ray").launcher_options(config, ProcessPlan(1, 2, "cpu", "ray"))
        assert Cluster(LaunchRequest("run", launcher_options=options)).wait_s == seconds


def test_resources_that_come_are_waited_for_and_others_are_refused_when_the_time_is_over(monkeypatch):
    looks = [FOUR[:1], FOUR[:1], FOUR[:2], FOUR]
    monkeypatch.setattr("distributed.backends._ray.cluster.LOOK_S", 0.01)
    said = []
    for wait_s, is_enough in ((60.0, True), (0.1, False)):
        options = {"address": "here:1", "cpus": 1.0, "wait": wait_s}
        cluster = Cluster(LaunchRequest("run", num_nodes=4, nproc_per_node=8, device="cuda", launcher_options=options))
        left = iter(looks)
        cluster._ray = types.SimpleNamespace(
            nodes=lambda left=left, is_enough=is_enough: next(left) if is_enough else FOUR[:3]
        )
        if is_enough:
            cluster._wait_for_resources(lambda what, left: said.append((what, left)))
        else:
            with pytest.raises(ResourceError, match=r"has 3 \(node0: 8 GPUs, .* wait for more with --wait"):
                cluster._wait_for_resources(lambda *_: None)
    assert [re.search(r"has (\w+) ", what)[1] for what, _ in said] == ["1", "2"] and 50 < said[0][1] <= 60


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
        ("here:1", "if 'ray start' there said 'Token authentication is enabled', set RAY_AUTH_MODE=token here"),
    ):
        cluster = Cluster(LaunchRequest("run", launcher_options={"address": address, "cpus": 1.0}))
        with pytest.raises(ResourceError, match=re.escape(said)):
            cluster.connect(0, lambda *_: None)


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
    assert connected() == "ray://head.example:10001"


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ResourceError, match=r"pip install 'distributed-trainer\[ray\]'"):
        make()
    assert "ray" in missing_libraries(backend_entry("ray"))


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


def worker(monkeypatch, rank, local, world, *nodes, device="cpu"):
    """Make this process a worker that Ray placed on a node with `local` of the `world` workers."""
    places = {
        "RANK": rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "a",
        "MASTER_PORT": 1,
    }
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    num_nodes, each = nodes
    request = LaunchRequest("run", num_nodes=num_nodes, nproc_per_node=each, device=device)
    monkeypatch.setattr("distributed.training.setup.launched_by", lambda: request)


@pytest.mark.parametrize(
    ("rank", "local", "world", "nodes", "settings", "plan"),
    [
        (0, 2, 3, (1, 3), {"nproc_per_node": 3}, (1, 3)),  # two on one node, one on another
        (2, 1, 3, (1, 3), {"nproc_per_node": 3}, (1, 3)),
        (1, 1, 2, (2, 1), {"nproc_per_node": 2}, (2, 1)),  # Ray chose two nodes
        (1, 1, 2, (2, 1), {"nproc_per_node": 2, "num_nodes": 1}, (2, 1)),
        (3, 2, 4, (2, 2), {"nproc_per_node": 2, "num_nodes": 2, "address": "head:6379"}, (2, 2)),
    ],
)
def test_all_workers_have_one_plan_however_ray_spreads_them(monkeypatch, rank, local, world, nodes, settings, plan):
    worker(monkeypatch, rank, local, world, *nodes)
    trainer = Trainer(print, backend="ray", device="cpu", **settings)
    assert trainer.plan == ProcessPlan(*plan, "cpu", "ray") and trainer.plan.world_size == world


def test_other_numbers_in_the_script_than_ray_was_told_are_an_error(monkeypatch):
    worker(monkeypatch, 0, 2, 3, 1, 3)
    with pytest.raises(
        ConfigError, match=r"nproc_per_node=2 in the script, but the launcher has started 3 processes per node"
    ):
        Trainer(print, backend="ray", device="cpu", nproc_per_node=2)


def test_a_worker_for_a_gpu_that_is_not_there_names_its_machine(monkeypatch):
    worker(monkeypatch, 1, 2, 2, 1, 2, device="cuda")
    monkeypatch.setattr("distributed.training.setup.visible_gpus", lambda: 0)
    with pytest.raises(ResourceError, match=rf"rank 1 on {re.escape(socket.gethostname())} was started for a GPU"):
        Trainer(print, backend="ray", nproc_per_node=2)
    assert Trainer(print, backend="ray", nproc_per_node=2, device="cpu").plan.device == "cpu"


class Slow:
    """A Ray whose first `times` starts are given up."""

    def __init__(self, times: int, words: str = "The current node timed out during startup. This could happen") -> None:
        self.times, self.words, self.starts = times, words, 0

    def init(self, address: str, **given: object) -> None:
        self.starts += 1
        if self.starts <= self.times:
            raise Exception(self.words)


def test_a_start_that_ray_gives_up_is_tried_again(tmp_path):
    ray = Slow(2)
    start_own(ray, tmp_path / "a", 1, 10**8)
    assert ray.starts == 3

    ray = Slow(3)
    with pytest.raises(ResourceError, match="Ray gave up 3 starts on this machine, because its own services did not"):
        start_own(ray, tmp_path / "b", 1, 10**8)

    ray = Slow(1, "no space is left")
    with pytest.raises(Exception, match="no space is left"):
        start_own(ray, tmp_path / "c", 1, 10**8)
    assert ray.starts == 1
