"""Start the workers of a script that need not use `Trainer`: from Python, and by `python -m distributed.launcher`."""

from __future__ import annotations

import dataclasses
import numbers
import os
import sys
from collections.abc import Sequence
from typing import Any

from distributed.config.merging import Overrides
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, DistributedError, nearest
from distributed.launching.environments.registry import worker_environment
from distributed.launching.environments.torchrun import pass_over_stale_rank
from distributed.launching.subprocess_launch import start_launcher

# names of LaunchConfig that differ from those of the settings
_SETTINGS = {"nnodes": "num_nodes", "backend": "communication_backend"}
_USAGE = """\
usage: python -m distributed.launcher SCRIPT [flags] [SCRIPT ARGUMENTS]

Starts SCRIPT in every process with the environment variables that torchrun sets.
Flags may stand before or after SCRIPT; everything after -- is passed to SCRIPT.

  --nproc_per_node N    processes per node (default: one per visible GPU, else 1)
  --nnodes N            machines (default: 1)
  --node_rank N         this machine's number (default: 0 on the host of node 0, else node 0 assigns one)
  --master_addr HOST    host of node 0 (default: localhost)
  --master_port PORT    port of node 0 (default: a free one; 29500 on several nodes)
  --backend NAME        transport: nccl, gloo or mpi (default: nccl on GPUs, else gloo)
  --device NAME         cuda or cpu (default: cuda if available)
  --max_restarts N      restarts after a worker was killed (default: 3)
  --monitor_interval S  seconds between two checks of the workers (default: 0.1)
  --start_timeout S     seconds all workers may take to join (default: 600)
  --run_dir DIR         directory for the run's files (default: runs/SCRIPT-TIME-ID)
"""


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """The processes to start: how many, at which address they join each other, and what happens when a process dies.

    None has the same effect as leaving out the flag of `distributed train`.

    Args:
        nproc_per_node: processes of each node; None means one per visible GPU, else one.
        nnodes: number of machines.
        node_rank: the number of this machine, from 0.
        master_addr: host of node 0.
        master_port: port of node 0; None means a free port, and 29500 with several nodes.
        backend: the transport, nccl, gloo or mpi; it overrides the backend that the script passes to `init_process_group`.
        device: "cuda" or "cpu"; None means cpu with gloo, otherwise cuda if it is available.
        max_restarts: restarts after a worker was killed.
        monitor_interval: seconds between two checks of the workers.
        start_timeout: seconds that all workers may take to join.
        run_dir: directory of the logs and events of the run; None means a new directory under runs/.

    Raises:
        ConfigError: a value is wrong.
    """

    nproc_per_node: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int | None = None
    backend: str | None = None
    device: str | None = None
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_timeout: float = 600.0
    run_dir: str | None = None

    def __post_init__(self) -> None:
        DistributedConfig(**self.settings())

    def settings(self) -> dict[str, Any]:
        """Return these values as settings of DistributedConfig, without those that are None or the default."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "run_dir" and getattr(self, field.name) != field.default
        }
        if self.backend == "gloo" and self.device is None:
            given["device"] = "cpu"
        return {_SETTINGS.get(name, name): value for name, value in given.items()}


class DistributedLauncher:
    """Launch scripts as `config` says. Each worker gets the environment variables that torchrun sets.

    Args:
        config: the processes to start. None means `LaunchConfig()`.
    """

    def __init__(self, config: LaunchConfig | None = None) -> None:
        self.config = config if config is not None else LaunchConfig()

    def launch(self, script: str | os.PathLike[str], *script_args: str | float | os.PathLike[str]) -> int:
        """Run `script` with `script_args` on this node's processes until they end. Return the exit code.

        A separate launcher process starts the workers, so this works in notebooks and threads.

        Args:
            script: path of the script.
            script_args: the arguments of the script. Numbers and paths are converted to text.

        Returns:
            0 if the script succeeded, 1 if it failed and its own error was printed, otherwise the exit code that
            `distributed train` would have.

        Raises:
            ConfigError: a setting is wrong, or this process is itself a worker. Nothing was started.
            ResourceError: a library, a device or a port is missing. Nothing was started.
        """
        from distributed.launcher.start import launch_request

        given = self.config.nproc_per_node or 1  # a call of launch() is a request to launch
        found = worker_environment(nproc_per_node=given, num_nodes=self.config.nnodes)
        if found is not None:
            raise ConfigError(
                f"launch({script!r}) was called in a process that already is rank {found.rank} of {found.world_size}: call it from a"
                " process that no launcher started"
            )
        overrides = _overrides(self.config, script, script_args)
        if (line := pass_over_stale_rank(dict(os.environ), nproc_per_node=given)) is not None:
            overrides = dataclasses.replace(overrides, notices=(line,))
        return start_launcher(launch_request(overrides, self.config.run_dir))


def launch_distributed_training(
    script: str | os.PathLike[str], *script_args: str | float | os.PathLike[str], **settings: Any
) -> int:
    """Run `script` with `script_args` on the processes that `settings` describe. Return the exit code.

    Args:
        script: path of the script.
        script_args: its arguments.
        settings: the arguments of LaunchConfig.

    Returns:
        The exit code, as that of `DistributedLauncher.launch`.

    Raises:
        ConfigError: LaunchConfig has no such setting, or `DistributedLauncher.launch` raises it.
        ResourceError: `DistributedLauncher.launch` raises it.
    """
    known = [field.name for field in dataclasses.fields(LaunchConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name}={settings[name]!r} is not a setting of LaunchConfig{nearest(name, known)}")
    return DistributedLauncher(LaunchConfig(**settings)).launch(script, *script_args)


def main(arguments: Sequence[str]) -> int:
    """Run `python -m distributed.launcher`, which starts the workers from this process. Return the exit code."""
    from distributed.config.flags import flags_of
    from distributed.launcher.start import start

    if not arguments or "--help" in arguments[:1] or "-h" in arguments[:1]:
        sys.stdout.write(_USAGE)
        return 0 if arguments else 2
    try:
        config, script, script_args = parse(arguments)
        overrides, words = _overrides(config, script, script_args), flags_of(script, config.settings())
        return start(overrides, run_dir=config.run_dir, resume=False, dry_run=False, words=words)
    except DistributedError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def parse(arguments: Sequence[str]) -> tuple[LaunchConfig, str, list[str]]:
    """Return (configuration, script, the script's arguments).

    Flags of the launcher may stand before and after the script, up to `--`.
    """
    kinds = {field.name: str(field.type) for field in dataclasses.fields(LaunchConfig)}
    given: dict[str, Any] = {}
    script: str | None = None
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if word == "--":
            rest += waiting if script is not None else waiting[1:]
            script = script if script is not None else next(iter(waiting), None)
            break
        if name in kinds:
            if not equals and not waiting:
                raise ConfigError(f"{flag} needs a value: write {flag}=VALUE")
            given[name] = _value(flag, value if equals else waiting.pop(0), kinds[name])
        elif script is not None:
            rest.append(word)
        elif word.startswith("-"):
            raise ConfigError(
                f"{flag} is not a flag of the launcher{nearest(name, kinds)}: put flags of the script after SCRIPT"
            )
        else:
            script = word
    if script is None:
        raise ConfigError("no script to run: python -m distributed.launcher train.py --nproc_per_node=2")
    return LaunchConfig(**given), script, rest


def _value(flag: str, text: str, kind: str) -> Any:
    convert = int if kind.startswith("int") else float if kind.startswith("float") else str
    try:
        return convert(text)
    except ValueError:
        raise ConfigError(
            f"{flag}={text!r} is not a number: give one, such as {flag}={1 if convert is int else 0.5}"
        ) from None


def _overrides(config: LaunchConfig, script: Any, script_args: Sequence[Any]) -> Overrides:
    return Overrides(flag=config.settings(), script=_text(script), script_args=tuple(map(_text, script_args)))


def _text(argument: Any) -> str:
    """Return an argument as it stands in the script's `sys.argv`: text as it is, numbers and paths as their text."""
    if isinstance(argument, (str, os.PathLike)):
        return os.fspath(argument)
    if isinstance(argument, numbers.Real) and not isinstance(argument, bool):
        return str(argument)
    raise ConfigError(f"script argument {argument!r} is a {type(argument).__name__}: pass text, {str(argument)!r}")
