"""The flags of `train`: public API; every mistake is answered in one line before any framework is imported."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from distributed.cli.__main__ import run
from distributed.cli.train import make_parser, read_overrides, train_parser
from distributed.config.flags import SETTINGS
from distributed.config.settings import GROUPS, DistributedConfig, group_options
from distributed.errors import DistributedError, ResourceError
from distributed.launcher.scripts import main as launcher
from distributed.launcher.start import _again
from distributed.launching.request import LaunchRequest
from distributed.launching.script import check_script

FLAGS = """
--script --config --set --run-dir --resume --dry-run --help --token-file
--backend --nproc-per-node --num-gpus --num-nodes --gpus-per-node --device
--node-rank --master-addr --master-port --address --wait
--epochs --max-steps --batch-size --global-batch-size --gradient-accumulation-steps
--seed --deterministic --no-deterministic
--shuffle --no-shuffle --init-from --dtype --validate-every-n-steps --max-validation-batches --early-stopping-patience --monitor --monitor-mode
--optimizer --learning-rate --weight-decay --scheduler --min-learning-rate
--lr-scaling --gradient-clipping --mixed-precision --scaler-init-scale --scaler-growth-interval
--activation-checkpointing --no-activation-checkpointing --compile --no-compile --communication-backend
--checkpoint-dir --resume-from-checkpoint --checkpoint-frequency --checkpoint-every-n-steps --checkpoint-every-s
--keep-latest-k --keep-best --no-keep-best --log-every-n-steps --verbose --no-verbose
--loggers --mlflow-tracking --no-mlflow-tracking
--mlflow-experiment --tensorboard --no-tensorboard --tensorboard-dir --profile --no-profile
--max-restarts --restart-on-exception --no-restart-on-exception --nan-policy
--world-size --rank --nnodes --rdzv-endpoint --save-interval --gradient-clip-norm --bucket-size-mb --bucket-cap-mb
--no-nccl --gradient-checkpointing --use-gradient-checkpointing --find-unused-parameters --static-graph
"""


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_flags_are_these():
    assert sorted(word for action in train_parser()._actions for word in action.option_strings) == sorted(FLAGS.split())


def test_help_shows_every_name_whole_at_80_columns(capsys):
    with pytest.raises(SystemExit) as end:
        run(["train", "--help"])

    text = capsys.readouterr().out
    assert end.value.code == 0
    assert max(map(len, text.splitlines())) <= 80
    for flag in FLAGS.split()[: FLAGS.split().index("--world-size")]:
        assert flag in text.replace("--[no-]", "--") or flag.startswith("--no-")
    assert "--bucket-size-mb" not in text
    options = [f"{group}.{name}" for group in GROUPS for name in group_options(group).__dataclass_fields__]
    assert {"ddp.bucket_cap_mb", "data.presharded"} <= set(options)
    flagless = text[text.index("--set NAME=VALUE, in YAML") :]
    for name in [*(set(DistributedConfig.__dataclass_fields__) - set(SETTINGS) - set(GROUPS)), *options]:
        assert re.search(rf"^  {name}\b\S*\s+\w", flagless, re.MULTILINE), name
    assert "scheduler_interval=step|epoch" in flagless


def test_only_flags_on_the_command_line_count():
    overrides = read_overrides(
        None, {"epochs": "3", "mixed_precision": "no", "shuffle": False}, ["ddp.bucket_cap_mb=50"], "a.py", ("-x",)
    )

    assert overrides.flag == {"epochs": 3, "mixed_precision": "no", "shuffle": False, "ddp": {"bucket_cap_mb": 50}}
    assert (overrides.script, overrides.script_args, overrides.file) == ("a.py", ("-x",), {})


def test_flags_are_stronger_than_the_file_and_aliases_are_said(tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: 5\nlearning_rate: 1e-4\nscript: old.py\nscript_args: [--deep]\n")

    overrides = read_overrides(str(tmp_path / "c.yaml"), {"epochs": "3", "save_interval": "10"}, [], None, ())

    assert overrides.flag == {"epochs": 3, "checkpoint_every_n_steps": 10}
    assert overrides.file == {"epochs": 5, "learning_rate": "1e-4"}
    assert (overrides.script, overrides.script_args) == ("old.py", ("--deep",))
    which = f"script old.py, from {tmp_path / 'c.yaml'}"
    assert overrides.notices == (which, "save_interval is read as checkpoint_every_n_steps")
    assert read_overrides(str(tmp_path / "c.yaml"), {}, [], "new.py", ()).notices == ()


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--verbose", True),
        ("--verbose true", True),
        ("--verbose=false", False),
        ("--verbose false", False),
        ("--no-verbose", False),
    ],
)
def test_a_switch_may_say_its_value(words, value):
    assert make_parser().parse_args(words.split()).verbose is value


def test_a_setting_that_may_be_true_may_stand_bare():
    given = make_parser().parse_args(["--mixed-precision", "--resume-from-checkpoint", "--epochs", "3"])
    flags = {name: value for name, value in vars(given).items() if name in SETTINGS and value is not None}
    overrides = read_overrides(None, flags, [], "a.py", ())
    assert overrides.flag == {"mixed_precision": True, "resume_from_checkpoint": True, "epochs": 3}


def test_a_default_can_be_switched_off():
    assert read_overrides(None, {"checkpoint_frequency": "null"}, [], "a.py", ()).flag == {"checkpoint_frequency": None}


HERE = ("train", "--script", "here.py")
WRONG = [
    (["trian"], 2, "'trian' is not a command (did you mean 'train'?)"),
    (["--foo"], 2, "'--foo' is a flag, not a command"),
    (["train", "--bacth-size", "3"], 2, "--bacth-size is not a flag of train (did you mean '--batch-size'?)"),
    (["train", "here.py"], 2, "'here.py' is not a flag: name the script with --script"),
    (["train", "--epochs"], 2, "--epochs: expected one argument"),
    (["train"], 2, "no script to run: add --script train.py"),
    (["train", "--script", "hree.py"], 2, "script 'hree.py' does not exist (did you mean 'here.py'?)"),
    (["train", "--script", "."], 2, "script '.' is a directory"),
    ([*HERE, "--epochs", "0"], 2, "epochs=0 must be at least 1"),
    ([*HERE, "--epochs", "many"], 2, "epochs='many' is not a whole number"),
    ([*HERE, "--learning-rate", "-1"], 2, "learning_rate=-1.0 must be greater than 0"),
    ([*HERE, "--verbose", "no"], 2, "--verbose takes no value 'no': write --[no-]verbose"),
    ([*HERE, "--set", "ddp=3"], 2, "ddp=3 is not a mapping"),
    ([*HERE, "--master-port", "99999"], 2, "master_port=99999 must be at most 65535"),
    ([*HERE, "--backend", "pytorch-dpp"], 2, "(did you mean 'pytorch-ddp'?)"),
    ([*HERE, "--backend", "pipeline"], 2, "backend='pipeline' is not in this version: choose one of single"),
    ([*HERE, "--set", "pipeline.x=1"], 2, "pipeline.x is not a setting: that backend is not in this version"),
    ([*HERE, "--communication-backend", "mpi"], 2, "communication_backend='mpi' does not work with backend='single'"),
    ([*HERE, "--warmup-steps", "3"], 2, "--warmup-steps is not a flag of train: write --set warmup_steps=VALUE"),
    ([*HERE, "--mixed-precision", "fp8"], 2, "choose one of no, fp16, bf16, True, False"),
    ([*HERE, "--backend", "nccl"], 2, "--communication-backend nccl"),
    ([*HERE, "--backend", "single", "--nproc-per-node", "2"], 2, "backend='single' does not work with 2 processes: it runs one process"),
    ([*HERE, "--backend", "single", "--set", "ddp.bucket_cap_mb=1"], 2, "ddp.bucket_cap_mb has no effect"),
    ([*HERE, "--set", "ddp.bucket_cap=1"], 2, "ddp.bucket_cap is not an option"),
    ([*HERE, "--set", "nonsense=1"], 2, "nonsense is not a setting"),
    ([*HERE, "--set", "epochs"], 2, "--set 'epochs' has no KEY=VALUE form"),
    ([*HERE, "--config", "missing.yaml"], 2, "config file 'missing.yaml' cannot be read"),
    ([*HERE, "--config", "bad.yaml"], 2, "bad.yaml', line 3 is not YAML"),
    ([*HERE, "--resume"], 2, "--resume needs the directory of the run: add --run-dir"),
    ([*HERE, "--resume", "--run-dir", "new"], 2, "run directory 'new' does not exist, but --resume continues an existing run"),
    ([*HERE, "--run-dir", "here.py"], 2, "run directory 'here.py' is not a directory"),
    ([*HERE, "--run-dir", "."], 2, "run directory '.' is not empty"),
    ([*HERE, "--num-gpus", "6", "--num-nodes", "2", "--gpus-per-node", "4"], 2, "set num_gpus=8 or drop it"),
    ([*HERE, "--num-gpus", "64"], 3, "use --num-gpus 0 --nproc-per-node 64 for CPU processes with gloo"),
    ([*HERE, "--num-nodes", "2", "--master-addr", "a:1", "--run-dir", "new"], 2, "master_addr='a:1' has a port: set master_addr=a and master_port=1"),
    ([*HERE, "--num-nodes", "2", "--nnodes", "1"], 2, "nnodes=1 and num_nodes=2 set the same: drop one of them"),
    ([*HERE, "--rdzv-endpoint", "a:1", "--master-addr", "b"], 2, "rdzv_endpoint=a:1 and master_addr=b set the same: drop one of them"),
    ([*HERE, "--num-nodes", "2", "--run-dir", "new"], 2, "num_nodes=2 needs the address of node 0 on every node: set master_addr"),
    ([*HERE, "--batch-size", "4", "--global-batch-size", "9"], 2, "global_batch_size=9 is not a multiple"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_a_mistake_is_one_line_with_its_exit_code(arguments, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("raise SystemExit('ran')")
    (tmp_path / "bad.yaml").write_text("a: 1\nb: [\n")
    handler = signal.getsignal(signal.SIGTERM)

    with pytest.raises(DistributedError) as caught:
        run(arguments)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == code
    assert names(tmp_path) == ["bad.yaml", "here.py"]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_port_in_use_is_known_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    with socket.create_server(("", 0)) as taken, pytest.raises(ResourceError, match="Address already in use"):
        run(
            [
                *HERE,
                "--num-nodes",
                "2",
                "--master-addr",
                "localhost",
                "--node-rank",
                "0",
                "--run-dir",
                "new",
                "--master-port",
                str(taken.getsockname()[1]),
            ]
        )
    assert names(tmp_path) == ["here.py"]


def test_a_port_in_use_is_no_error_on_one_node_which_needs_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    with socket.create_server(("", 0)) as taken:
        assert run([*HERE, "--dry-run", "--master-port", str(taken.getsockname()[1])]) == 0
    assert "no effect here unless the script changes that: master_port (one node)" in capsys.readouterr().out


def test_on_the_command_line_it_is_quick_and_loads_no_framework(run_python, tmp_path):
    code = (
        "import sys; from distributed.cli.__main__ import main\n"
        "try: main(['train', '--script', 'gone.py', '--nproc-per-node', '2'])\n"
        "finally: print([name for name in ('torch', 'numpy', 'rich', 'typer', 'pydantic') if name in sys.modules])"
    )

    done = run_python(["-c", code], cwd=tmp_path)

    assert done.returncode == 2, done.output
    assert done.stdout == "[]\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: script 'gone.py' does not exist")


@pytest.mark.parametrize("source", ["import os\nx = = 1\n", "if True:\nprint(1)\n", "print('open\n"])
def test_a_script_that_is_no_python_is_what_python_says_of_it_and_nothing_starts(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(source)
    (tmp_path / "space.yaml").write_text("learning_rate: {loguniform: [1e-4, 1e-1]}\n")
    said = subprocess.run([sys.executable, "bad.py"], capture_output=True, text=True, timeout=30).stderr.rstrip()
    said = said.replace(f'"{tmp_path}/bad.py"', '"bad.py"')
    assert 'File "bad.py", line ' in said
    train = ["train", "--script", "bad.py", "--nproc-per-node", "2", "--device", "cpu"]
    tune = ["tune", "--script", "bad.py", "--search-space", "space.yaml", "--num-samples", "2"]
    for arguments in (train, [*train, "--dry-run"], tune, [*tune, "--dry-run"]):
        with pytest.raises(DistributedError) as caught:
            run(arguments)
        assert caught.value.exit_code == 1
        told = re.sub(r"\^+", "^", str(caught.value))  # from a file Python marks less of the line than from a text
        assert told == re.sub(r"\^+", "^", f"script 'bad.py' does not compile:\n{said}")
    assert names(tmp_path) == ["bad.py", "space.yaml"]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("distributed.cli.__main__", ["train", "--script"]), ("distributed.launcher.scripts", ["--nproc_per_node=2"])],
)
def test_a_syntax_error_is_known_before_a_framework_is_loaded(module, arguments, run_python, tmp_path):
    (tmp_path / "bad.py").write_text("import torch\n\ndef f(:\n")
    code = (
        f"import atexit, sys; from {module} import main\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"sys.exit(main({[*arguments, 'bad.py']}))"
    )
    done = run_python(["-c", code], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "False\n"), done.output
    assert 'File "bad.py", line 3' in done.stderr and "SyntaxError: invalid syntax" in done.stderr
    assert "Traceback" not in done.output and names(tmp_path) == ["bad.py"]


def test_a_warning_of_the_compiler_is_the_workers_to_give(tmp_path, recwarn):
    (tmp_path / "odd.py").write_text("assert (1, 'always true')\n")
    check_script(str(tmp_path / "odd.py"))
    assert not recwarn.list


def test_dry_run_says_everything_and_starts_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("raise SystemExit('ran')")

    code = run([
        *HERE, "--nproc_per_node", "2", "--global-batch-size", "64", "--device", "cpu", "--dry-run",
        "--", "--deep",
    ])  # fmt: skip

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert names(tmp_path) == ["here.py"]
    assert [line.split() for line in lines[1:4]] == [
        ["nproc_per_node", "2", "flag"],
        ["device", "cpu", "flag"],
        ["global_batch_size", "64", "flag"],
    ]
    text = "\n".join(lines)
    assert "global_batch_size 64 = batch_size 32 x gradient_accumulation_steps 1 x data_parallel_size 2" in text
    assert "script         here.py --deep" in text
    assert "2 processes, device cpu" in text
    assert "runs/here-" in text


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (["--epochs", "3", "--run-dir", "my runs", "--resume"], "--script here.py --epochs 3 --run-dir 'my runs' --resume"),
        (["--run_dir=r", "--set", "ddp.bucket_cap_mb=5"], "--script here.py --set ddp.bucket_cap_mb=5 --run-dir r --resume"),
        (["--run-dir", "r", "--mixed-precision", "--", "--name", "a b", "--resume"],
         "--script here.py --mixed-precision --run-dir r --resume -- --name 'a b' --resume"),
    ],
)  # fmt: skip
def test_the_command_that_goes_on_with_a_run_is_the_one_of_the_user(command, again, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    (tmp_path / "my runs").mkdir()  # which --resume asks for
    requests = []
    monkeypatch.setattr("distributed.launcher.start.launch", lambda request: requests.append(request) or 0)
    assert run([*HERE, *command]) == 0
    assert requests[0].again == f"python -m distributed.cli train {again}"


@pytest.mark.parametrize(
    ("on_path", "shown"),
    [
        ("env/bin/python", "python"),
        ("env/bin/python3", "python"),  # another name of the same interpreter
        ("base/bin/python", "'{}/my env/bin/python'"),  # which that of the environment is a link to
        (None, "'{}/my env/bin/python'"),
    ],
)
def test_the_command_that_goes_on_names_the_interpreter_that_python_does_not_find(
    on_path, shown, tmp_path, monkeypatch
):
    for place in ("base/bin", "my env/bin"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "base" / "bin" / "python").touch()
    for name in ("python", "python3"):
        (tmp_path / "my env" / "bin" / name).symlink_to(tmp_path / "base" / "bin" / "python")
    (tmp_path / "env").symlink_to(tmp_path / "my env")
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/my env/bin/python")
    monkeypatch.setattr(shutil, "which", lambda name: on_path and f"{tmp_path}/{on_path}")
    request = LaunchRequest("runs/one", script_args=("a b",))
    command = f"{shown.format(tmp_path)} -m distributed.cli train --epochs 2 --run-dir runs/one --resume -- 'a b'"
    assert _again(["--epochs", "2"], request, "runs/one") == command


def test_the_command_that_goes_on_with_a_run_of_the_launcher_is_one_of_train(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    requests = []
    monkeypatch.setattr("distributed.launcher.start.launch", lambda request: requests.append(request) or 0)
    assert launcher(["--nproc_per_node=2", "--start_timeout=9", "here.py", "--fast"]) == 0
    words = f"--script here.py --nproc-per-node 2 --set start_timeout=9.0 --run-dir {requests[0].run_dir} --resume -- --fast"
    assert requests[0].again == f"python -m distributed.cli train {words}"


def test_no_command_shows_the_commands(capsys):
    assert run([]) == 2
    assert run(["--help"]) == 0
    assert capsys.readouterr().out.count("train  ") == 2
