"""Workers under `train --script`: what a plain script finds, and what happens when something dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import distributed
from distributed.launching.request import LaunchRequest
from tests.conftest import ROOT, clean_environment, free_port, needs_backend, poll
from tests.warm import PARENT

LAUNCH = str(Path(distributed.__file__).parent / "launching" / "main.py")
pytestmark = pytest.mark.timeout(480)

JOIN = """
import json, os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
READY = "print('ready', flush=True)\nopen(f'ready-{rank}', 'w').close()\n"

FACTS = """
import atexit, json, os, random, subprocess, sys, threading, time
import torch, torch.distributed as dist

class Local:
    pass

def main():
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    code = "import os; print('DISTRIBUTED_CONFIG' in os.environ)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    facts = dict(
        total=total.item(), argv=sys.argv, name=__name__, file=__file__, path=sys.path[0], cwd=os.getcwd(),
        spec=__spec__,
        is_main_module=sys.modules["__main__"].__dict__ is globals(), qualified=Local.__module__,
        environ=dict(os.environ),
        child=child.stdout, threads=torch.get_num_threads(), draw=random.random(), seed=torch.initial_seed(),
        group=os.getpgid(0) == os.getpid(), stdin=sys.stdin.read(), shown=open("/proc/self/comm").read(),
    )
    with open(os.path.join(sys.argv[1], f"facts-{dist.get_rank()}.json"), "w") as file:
        json.dump(facts, file)
    print("hello from", dist.get_rank())
    print("partial line", end="")
    print("to stderr", file=sys.stderr)
    dist.destroy_process_group()
    atexit.register(lambda: print("; at exit", dist.is_initialized()))
    threading.Thread(target=late).start()

def late():
    time.sleep(0.2)
    open(os.path.join(sys.argv[1], "thread-" + os.environ["RANK"]), "w").close()

if __name__ == "__main__":
    main()
"""


def write(directory: Path, text: str, name: str = "script.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


def train(script: Path, *more: str, processes: int = 2) -> list[str]:
    return [
        "train",
        "--script",
        str(script),
        "--nproc-per-node",
        str(processes),
        "--run-dir",
        str(script.parent / "run"),
        *more,
    ]


def light(script: Path, **more: object) -> list[str]:
    """Arguments of python for a launch that preloads nothing: quicker, for scripts without torch."""
    request = LaunchRequest(str(script.parent / "run"), script=str(script), nproc_per_node=2, preload=(), **more)  # type: ignore[arg-type]
    file = script.with_suffix(".json")
    file.write_text(request.to_json())
    return [LAUNCH, str(file), PARENT]


def start_light(start, script: Path, **more: object):
    """A light launch that has joined on both ranks."""
    command = start([sys.executable, *light(script, **more)], cwd=script.parent)
    command.wait_for(lambda: all((script.parent / f"ready-{rank}").exists() for rank in (0, 1)))
    return command


WARMING = """
import importlib, pathlib, sys

def once(request):
    import subprocess
    subprocess.run(["true"])  # its end is a SIGCHLD, as that of the agent
    import shared

def slowly(request):
    for number in range(300):
        pathlib.Path(f"slow_{number}.py").write_text("import time; time.sleep(0.1)")
    pathlib.Path("warming").touch()
    for number in range(300):
        importlib.import_module(f"slow_{number}")
"""


def test_what_the_launcher_imports_before_it_forks_is_imported_once_for_all_workers(run_python, tmp_path):
    write(tmp_path, WARMING, "warming.py")
    write(tmp_path, "import os\nmade_by = os.getpid()", "shared.py")
    script = write(tmp_path, "import os, shared\nassert shared.made_by == os.getppid() != os.getpid()")
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = run_python(light(script, warm_up="warming:once"), cwd=tmp_path, env=path)
    assert done.returncode == 0, done.output


def test_a_stop_ends_these_imports(start, tmp_path):
    write(tmp_path, WARMING, "warming.py")
    script = write(tmp_path, "raise SystemExit('no worker may start')")
    arguments = light(script, warm_up="warming:slowly")
    command = start([sys.executable, *arguments], cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    command.wait_for((tmp_path / "warming").exists)
    began = time.monotonic()
    command.signal(signal.SIGINT)
    done = command.finish(60)
    assert done.returncode == 128 + signal.SIGINT and time.monotonic() - began < 15, (
        done.output
    )  # the imports take 30 s
    assert "no worker may start" not in done.output


@pytest.mark.parametrize(
    ("backend", "module"),
    [("tensorflow", "tensorflow"), pytest.param("deepspeed", "deepspeed", marks=pytest.mark.full)],
)
def test_a_slow_library_is_imported_by_the_launcher_of_workers_on_cpus(run_python, backend, module):
    """On GPUs it is not: a process forked after its library used a GPU cannot use it."""
    needs_backend(backend)
    script = f"""
        import pkgutil, sys
        from distributed.config.registry import backend_entry
        from distributed.launching.request import LaunchRequest
        row = backend_entry({backend!r})
        for device in ("cuda", "cpu"):
            pkgutil.resolve_name(row.warm_up)(LaunchRequest("run", device=device, environ=row.environ))
            print(device, {module!r} in sys.modules)
    """
    done = run_python(["-c", textwrap.dedent(script)])
    assert done.stdout == "cuda False\ncpu True\n", done.output


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """One script under our launcher and torchrun: its home, and by launcher the facts of each rank and the result."""
    home = tmp_path_factory.mktemp("facts")
    write(home, FACTS)
    base = clean_environment()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        base.pop(name, None)
    settings = f"--nproc-per-node 2 --master-port {free_port()} --seed 0 --epochs 3 --set ddp.static_graph=true"
    ours = f"-m distributed.cli train --script script.py --run-dir run {settings} -- ours"
    theirs = "-m torch.distributed.run --nproc-per-node 2 --standalone script.py torchrun"
    commands = {"ours": [*ours.split(), "--x", "a b"], "torchrun": [*theirs.split(), "--x", "a b"]}
    found = {}
    for name, command in commands.items():
        (home / name).mkdir()
        done = subprocess.run(
            [sys.executable, *command], cwd=home, env=base, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = ([json.loads((home / name / f"facts-{rank}.json").read_text()) for rank in (0, 1)], done)
    return home, found


def test_a_torchrun_script_finds_its_world(facts):
    _, found = facts
    ours, _ = found["ours"]

    assert [each["total"] for each in ours] == [3.0, 3.0]
    assert [each["environ"]["RANK"] for each in ours] == ["0", "1"]


def test_a_script_finds_the_port_that_was_set(facts):
    ours, done = facts[1]["ours"]
    port = done.args[done.args.index("--master-port") + 1]
    assert [each["environ"]["MASTER_PORT"] for each in ours] == [port, port]


def test_the_environment_is_torchruns(facts):
    _, found = facts
    variable = (
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE",  # theirs is shared: that is what makes their restarts hang
        "MASTER_ADDR",
    )
    for rank in (0, 1):
        theirs, ours = (found[name][0][rank]["environ"] for name in ("torchrun", "ours"))
        theirs.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # speaks to torchrun's own process
        given = {
            name
            for name in theirs
            if name.startswith(("TORCH", "MASTER_")) or name.endswith(("RANK", "_SIZE", "ROLE_NAME"))
        }
        assert given - set(ours) == set()
        assert {name: ours[name] for name in given if name not in variable} == {
            name: theirs[name] for name in given if name not in variable
        }


def test_a_worker_is_as_python_script_arguments(facts):
    home, found = facts
    for each in found["ours"][0]:
        assert (each["argv"], each["name"]) == (["script.py", "ours", "--x", "a b"], "__main__")
        assert (each["path"], each["cwd"]) == (str(home.resolve()), str(home.resolve()))
        assert each["is_main_module"]
        assert (each["qualified"], each["spec"], each["file"]) == ("__main__", None, str(home.resolve() / "script.py"))
    for name in ("file", "name", "path", "cwd"):
        assert [each[name] for each in found["ours"][0]] == [each[name] for each in found["torchrun"][0]]
        assert each["group"]
        assert each["stdin"] == ""


def test_ps_names_the_rank_of_a_worker(facts):
    assert [each["shown"] for each in facts[1]["ours"][0]] == ["rank 0\n", "rank 1\n"]


def test_a_worker_tells_its_own_children_nothing(facts):
    assert [each["child"].strip() for each in facts[1]["ours"][0]] == ["False", "False"]


def test_cores_are_shared_and_every_rank_draws_alike_from_the_seed(facts):
    ours = facts[1]["ours"][0]
    cores = len(os.sched_getaffinity(0))

    assert [each["threads"] for each in ours] == [max(1, cores // 2)] * 2
    assert ours[0]["draw"] == ours[1]["draw"]
    assert [each["seed"] for each in ours] == [0, 0]


def test_logs_hold_every_rank_and_the_console_rank_0(facts):
    home, found = facts
    for rank in (0, 1):
        lines = (home / "run" / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert all(line.startswith(f"[rank {rank} ") for line in lines)
        texts = [line.partition("] ")[2] for line in lines]
        assert set(texts) == {f"hello from {rank}", "to stderr", "partial line; at exit False"}
    done = found["ours"][1]
    assert "hello from 0\npartial line; at exit False\n" in done.stdout
    assert "hello from 1" not in done.stdout
    assert done.stderr == "to stderr\nwarning: script.py made no Trainer, so epochs, ddp.static_graph had no effect\n"


def test_threads_of_a_worker_end_before_it(facts):
    assert [(facts[0] / "ours" / f"thread-{rank}").exists() for rank in (0, 1)] == [True, True]


def test_an_exception_on_one_rank_is_the_last_thing_on_the_screen(run_cli, tmp_path):
    script = write(
        tmp_path,
        JOIN
        + """
def deeper():
    raise ValueError("boom on one rank")

if rank == 1:
    open("when", "w").write(str(time.time()))
    deeper()
import torch
dist.all_reduce(torch.ones(1))
""",
    )

    done = run_cli(train(script), cwd=tmp_path)

    took = time.time() - float((tmp_path / "when").read_text())
    lines = done.stderr.splitlines()
    assert done.returncode == 1, done.output
    assert lines[-1] == "ValueError: boom on one rank"
    assert lines[0].startswith("error: rank 1 failed with ValueError")
    assert lines[1].startswith("Traceback")
    assert lines[2] == f'  File "{script}", line 12, in <module>'
    assert "Connection" not in done.stdout + done.stderr
    assert done.stderr.count("Traceback") == 1
    assert took <= 3
    assert "ValueError: boom on one rank" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert events(tmp_path / "run").count("restarted") == 0


def test_a_killed_worker_restarts_the_group(run_cli, tmp_path):
    script = write(
        tmp_path,
        JOIN
        + """
import torch
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open("when", "w").write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(1)
dist.all_reduce(total)
if rank == 0:
    after = time.time() - float(open("when").read())
    print("sum", total.item(), "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "after", after)
""",
    )

    done = run_cli(train(script), cwd=tmp_path)

    assert done.returncode == 0, done.output
    assert "sum 2.0 attempt 1" in done.stdout
    assert "warning: rank 1 was killed by signal 9 (SIGKILL): restarting (1 of 3)" in done.stderr
    assert events(tmp_path / "run") == ["worker_failed", "restarted"]
    assert float(done.stdout.split("after ")[1].split()[0]) < 4


def test_no_restart_is_left_for_a_worker_that_always_dies(run_python, tmp_path):
    script = write(tmp_path, JOIN + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()\n")

    done = run_python(light(script, max_restarts=1), cwd=tmp_path)

    assert done.returncode == 1, done.output
    assert done.stderr.splitlines()[-1].startswith("error: rank 1 was killed by signal 9 (SIGKILL)")
    assert events(tmp_path / "run") == ["worker_failed", "restarted", "worker_failed"]


def test_an_exception_restarts_where_asked(run_python, tmp_path):
    script = write(
        tmp_path,
        """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
    raise OSError("flaky")
print("done")
""",
    )

    done = run_python(light(script, restart_on_exception=True), cwd=tmp_path)

    assert done.returncode == 0, done.output
    assert "rank 0 failed with OSError: flaky: restarting (1 of 3)" in done.stderr


def test_after_an_error_of_a_gpu_kernel_the_restart_waits_for_each_kernel(run_python, tmp_path):
    script = write(
        tmp_path,
        """
import os, sys, time
if os.environ["RANK"] == "1" and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
    raise RuntimeError("the line is known")
if os.environ["RANK"] == "1":  # what torch writes when it destroys a tensor after the error
    sys.stderr.write("terminate called after throwing an instance of 'c10::AcceleratorError'\\n")
    sys.stderr.write("  what():  CUDA error: device-side assert triggered\\nframe #0: _start\\n")
    sys.stderr.flush()
    os.abort()
time.sleep(60)
""",
    )

    done = run_python(light(script), cwd=tmp_path)

    assert done.returncode == 1, done.output
    why = "rank 1 was killed by signal 6 (SIGABRT): CUDA error: device-side assert triggered"
    assert (
        f"warning: {why}: restarting (1 of 3) with CUDA_LAUNCH_BLOCKING=1, so that the traceback shows the failing line"
        in done.stderr
    )
    assert "error: rank 1 failed with RuntimeError" in done.stderr and "the line is known" in done.stderr
    assert events(tmp_path / "run") == ["worker_failed", "restarted", "worker_failed"]


@pytest.mark.parametrize(
    ("ending", "code", "line"),
    [
        ("sys.exit(3)", 1, "error: rank 1 exited with code 3"),
        ("sys.exit('a reason')", 1, "error: rank 1 exited with code 1"),
        (
            "from distributed.errors import ConfigError; raise ConfigError('epochs=0: set epochs=1')",
            2,
            "error: epochs=0: set epochs=1",
        ),
    ],
)
def test_an_orderly_refusal_is_one_line_and_final(run_python, tmp_path, ending, code, line):
    script = write(tmp_path, f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ending}\ntime.sleep(60)\n")

    done = run_python(light(script), cwd=tmp_path)

    assert done.returncode == code, done.output
    assert done.stderr.splitlines()[-1:] == [line]
    assert "Traceback" not in done.stderr
    assert "restarted" not in events(tmp_path / "run")


def test_a_rank_that_leaves_early_is_the_cause_of_lost_connections(run_python, tmp_path):
    script = write(tmp_path, "import os\nif os.environ['RANK'] == '0':\n    raise ConnectionResetError('by peer')\n")

    done = run_python(light(script), cwd=tmp_path)

    assert done.returncode == 1, done.output
    assert done.stderr == (
        "error: rank 1 exited with code 0 while other ranks were still running:"
        " every rank must call fit(), evaluate(), predict() and save()\n"
    )


STOPPABLE = (
    JOIN
    + """
def stop(number, frame):
    open(f"stopped-{rank}-{number}", "w").close()
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, stop)
"""
    + READY
    + "while True: time.sleep(0.05)\n"
)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143), (signal.SIGHUP, 143)],
)
def test_a_signal_reaches_every_worker_and_nobody_is_left(start, tmp_path, number, code):
    script = write(tmp_path, STOPPABLE)
    command = start_light(start, script)

    command.signal(number)
    command.signal(number)
    done = command.finish(120)

    assert done.returncode == code, done.output
    heard = signal.SIGTERM if number == signal.SIGHUP else number
    assert sorted(path.name for path in tmp_path.glob("stopped-*")) == [
        f"stopped-{rank}-{int(heard)}" for rank in (0, 1)
    ]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "events.jsonl").exists() or "restarted" not in events(tmp_path / "run")


def test_under_nohup_the_end_of_the_terminal_means_nothing(start, tmp_path):
    script = write(tmp_path, JOIN + READY + "while not os.path.exists('go'): time.sleep(0.05)\nprint('to the end')\n")
    command = start(["nohup", sys.executable, *light(script)], cwd=tmp_path)
    command.wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))

    command.signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    done = command.finish(120)

    assert done.returncode == 0, done.output
    assert "to the end" in done.stdout


def test_an_interrupt_before_any_worker_is_quiet(start, tmp_path):
    script = write(tmp_path, JOIN + READY + "time.sleep(300)\n")
    command = start([sys.executable, "-m", "distributed.cli", *train(script)], cwd=tmp_path)
    command.wait_for("run directory:")

    command.signal(signal.SIGINT)
    done = command.finish(120)

    assert done.returncode == 130, done.output
    assert done.stderr == ""
    assert not (tmp_path / "ready-0").exists()


def test_workers_that_ignore_a_signal_are_killed_when_time_is_up(start, tmp_path):
    script = write(tmp_path, JOIN + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(300)\n")
    command = start_light(start, script, timeout_s=1.0)

    command.signal(signal.SIGTERM)

    assert command.finish(120).returncode == 143


def test_killing_the_launcher_kills_everybody_and_frees_the_directory(start, run_cli, tmp_path):
    script = write(tmp_path, JOIN + READY + "time.sleep(300)\n")
    command = start_light(start, script)
    assert len(command.alive()) == 4

    second = run_cli([*train(script), "--resume"], cwd=tmp_path)
    command.signal(signal.SIGKILL)

    assert second.returncode == 3  # the holder may end soon, so it is worth another attempt
    assert f"is in use by process {command.pid} on " in second.stderr
    command.process.wait()
    poll(lambda: command.alive() == [], 5, lambda: f"still there: {command.alive()}")
    script.write_text("print('again')\n")
    assert run_cli([*train(script, processes=1), "--resume"], cwd=tmp_path).returncode == 0


OPEN_PORTS = """
def open_ports():
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    rows = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/net/{table}").readlines()[1:]]
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes and not row[1].startswith(loopback)]
"""


def test_workers_of_one_node_join_again_and_again_and_open_no_port_to_others(start, tmp_path):
    script = write(
        tmp_path,
        JOIN
        + OPEN_PORTS
        + """
import torch
found = open_ports()
for _ in range(2):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=2)
print("open", found + open_ports())
""",
    )
    done = start([sys.executable, *light(script)], cwd=tmp_path).finish(120)
    assert done.returncode == 0, done.output
    for rank in range(2):
        assert (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text().rstrip().endswith("open []")


@pytest.mark.parametrize("secret", ["", "0123456789abcdef0123"])
def test_two_nodes_run_and_restart_together(secret, start, tmp_path, monkeypatch):
    monkeypatch.setenv("DISTRIBUTED_TOKEN", secret)
    script = write(
        tmp_path,
        JOIN
        + """
import torch
total = torch.ones(1)
dist.all_reduce(total)
if rank == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print("total", total.item(), "node", os.environ["GROUP_RANK"], "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
""",
    )
    port = free_port()
    nodes = []
    for node in (1, 0):
        command = light(script, num_nodes=2, node_rank=node, master_port=port, start_timeout=30.0)
        file = script.with_suffix(f".{node}.json")
        script.with_suffix(".json").rename(file)
        nodes.append(start([sys.executable, command[0], str(file), command[2]], cwd=tmp_path))

    ended = [node.finish(120) for node in nodes]

    assert [each.returncode for each in ended] == [0, 0], ended[0].output + ended[1].output
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text().splitlines()[-1] for rank in range(4)]
    assert [line.partition("] ")[2] for line in logs] == [f"total 16.0 node {rank // 2} attempt 1" for rank in range(4)]


def test_a_node_does_not_wait_for_ever_for_one_that_has_failed(start, tmp_path):
    script = write(tmp_path, "import os, time\nif os.environ['GROUP_RANK'] == '0':\n    time.sleep(300)\nos._exit(1)\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text('{"status": "running"}')
    port = free_port()
    nodes = []
    for node in (1, 0):
        command = light(
            script, num_nodes=2, node_rank=node, master_port=port, start_timeout=30.0, max_restarts=0, resume=True,
        )  # fmt: skip
        file = script.with_suffix(f".{node}.json")
        script.with_suffix(".json").rename(file)
        nodes.append(start([sys.executable, command[0], str(file), command[2]], cwd=tmp_path))

    failed, waiting = [node.finish(60) for node in nodes]

    assert [failed.returncode, waiting.returncode] == [1, 1]
    assert "error: rank" in failed.stderr and "exited with code 1" in failed.stderr, failed.output
    assert re.search(r"^error: rank \d on node 1 \(.*\) exited with code 1", waiting.stderr, re.M), waiting.output
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


def test_the_death_of_the_agent_is_said(start, tmp_path):
    script = write(tmp_path, JOIN + READY + "time.sleep(300)\n")
    command = start_light(start, script)
    groups = {pid: os.getpgid(pid) for pid in command.alive()}
    agent = next(pid for pid, group in groups.items() if group == command.pid and pid != command.pid)

    os.kill(agent, signal.SIGKILL)
    done = command.finish(120)

    assert done.returncode == 1
    assert f"the agent of this run (process {agent}) was killed by signal 9" in done.stderr


CALLER = """
import os, sys, time
print("module runs in", os.getpid())
import cloudpickle
from distributed.launching.request import LaunchRequest
from distributed.launching.subprocess_launch import start_launcher

class Mine:
    text = "by value"

def job():
    import torch
    from distributed.launching.request import handover, link
    told = handover()
    print("job:", Mine.text, os.environ["RANK"], told.overrides.flag["epochs"], told.run_dir, link() is not None)
    ENDING

with open("job.pickle", "wb") as file:
    file.write(cloudpickle.dumps(job))
from distributed.config.merging import Overrides
request = LaunchRequest(
    "run", Overrides(flag={"epochs": 2}), payload="job.pickle", working_dir=os.getcwd(), sys_path=tuple(sys.path),
    nproc_per_node=2, verbose=False)
try:
    print("code", start_launcher(request))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_plain_script_starts_workers_without_a_guard(run_python, tmp_path):
    script = write(tmp_path, CALLER.replace("ENDING", "pass"))

    done = run_python([str(script)], cwd=tmp_path)

    assert done.returncode == 0, done.output
    assert done.stdout.count("module runs in") == 1
    assert "job: by value 0 2 run True" in done.stdout
    assert "code 0" in done.stdout
    assert "job: by value 1 2 run True" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def test_output_goes_where_a_notebook_wants_it(run_python, tmp_path):
    cell = """
        import io, sys
        class Cell(io.StringIO):
            def fileno(self):
                return 1
        sys.stdout = cell = Cell()
        """
    body = textwrap.dedent(cell) + CALLER.replace("ENDING", "print('ünï', end='')")
    script = write(tmp_path, body + "open('cell.txt', 'w', encoding='utf-8').write(cell.getvalue())\n")

    done = run_python([str(script)], cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, ""), done.output
    text = (tmp_path / "cell.txt").read_text(encoding="utf-8")
    assert "job: by value 0 2 run True\nünï" in text
    assert text.endswith("code 0\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_plain_script_that_ends_takes_its_workers_along(start, tmp_path, number):
    script = write(
        tmp_path, CALLER.replace("ENDING", "open('ready-' + os.environ['RANK'], 'w').close(); time.sleep(300)")
    )
    command = start([sys.executable, str(script)], cwd=tmp_path)
    command.wait_for(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists())

    command.signal(number)
    done = command.finish(120)

    assert ("interrupted" in done.stdout) == (number == signal.SIGINT), done.output


def test_a_worker_of_another_launcher_does_not_launch_again(run_cli, tmp_path):
    script = write(
        tmp_path,
        """
        import os, sys
        from distributed.launching.request import handover, link
        epochs = handover().overrides.flag["epochs"]
        print("rank", os.environ["RANK"], os.environ["LOCAL_RANK"], epochs, sys.argv[1:], link(), __name__)
        import torch
        print("seed", torch.initial_seed())
        """,
    )
    told = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
            "SLURM_STEP_NODELIST": "n[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "7"}  # fmt: skip

    done = run_cli(["train", "--script", str(script), "--epochs", "3", "--", "--flag"], cwd=tmp_path, env=told)

    assert done.returncode == 0, done.output
    assert done.stdout == "rank 3 1 3 ['--flag'] None __main__\nseed 0\n"
    assert not (tmp_path / "runs").exists()


def test_a_worker_of_another_launcher_fails_with_its_own_traceback(run_cli, tmp_path):
    script = write(tmp_path, "def f():\n    raise KeyError('gone')\nf()\n")
    told = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}

    done = run_cli(["train", "--script", str(script)], cwd=tmp_path, env=told)

    assert done.returncode == 1, done.output
    assert done.stderr.splitlines()[0].startswith("Traceback")
    assert done.stderr.splitlines()[1] == f'  File "{script}", line 3, in <module>'
    assert "KeyError" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


# ------------------------------------------------------------------ how commands end


def test_a_script_in_a_process_of_another_launcher_ends_as_under_python(run_cli, tmp_path):
    """Python closes the files that the script left open."""
    script = write(
        tmp_path,
        """
        import torch, sys
        left_open = open("left-open.txt", "w")
        left_open.write("all of it")
        print("also with another stream")
        sys.stdout = open("other.txt", "w")
        print("and there")
        """,
    )
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = run_cli(["train", "--script", str(script)], cwd=tmp_path, env=world, fresh=True)

    assert done.returncode == 0, done.output
    assert (tmp_path / "left-open.txt").read_text() == "all of it"
    assert "also with another stream" in done.stdout and (tmp_path / "other.txt").read_text() == "and there\n"


def test_a_profiler_of_the_launcher_writes_its_file(run_python, tmp_path):
    script = write(tmp_path, "print('trained')")
    command = ["-m", "cProfile", "-o", "launcher.prof", "-m", "distributed.cli", "train", "--script", str(script)]
    done = run_python([*command, "--nproc-per-node", "2", "--run-dir", "run"], cwd=tmp_path)

    assert done.returncode == 0 and "trained" in done.stdout, done.output
    assert (tmp_path / "launcher.prof").stat().st_size > 1000


LEAVES = """
import atexit, sys
from distributed.runs.processes import leave, skip_teardown

class Teardown:
    def __del__(self):
        print("cleared", flush=True)

kept = Teardown()
atexit.register(print, "exit function")
skip_teardown()
if sys.argv[1] == "full":
    print("x", file=(stdout := open("/dev/full", "w")))
    sys.stdout = stdout
leave(3)
"""


def test_a_launcher_runs_exit_functions_and_clears_no_modules(run_python):
    done = run_python(["-c", LEAVES, "short"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "exit function\n", "")


def test_output_that_cannot_be_written_is_an_error_at_the_end(run_python):
    done = run_python(["-c", LEAVES, "full"])
    assert done.returncode == 120 and "No space left on device" in done.stderr, done.output
