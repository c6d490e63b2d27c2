"""`distributed train`: run a script on one or many processes. Every flag stands here by hand: a flag is public API."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from distributed.config import DistributedConfig
from distributed.errors import ConfigError
from distributed.fields import Rule, rules
from distributed.settings import Typed, canonical, read_config_file

_RULES = rules(DistributedConfig)
_RUN = "Run"


def _flag(name: str, metavar: str | None = None) -> Any:
    """The flag of one setting. Its value stays text, so that one place says what is wrong with it; untyped it is None."""
    rule = _RULES[name]
    shown = metavar or ("|".join(map(str, rule.choices)) if rule.choices and len(rule.choices) < 4 else _metavar(rule))
    return typer.Option(None, f"--{name.replace('_', '-')}", help=_help(name, rule), metavar=shown, rich_help_panel=rule.group)


def _switch(name: str) -> Any:
    """A flag without a value, with its `--no-` form."""
    rule, word = _RULES[name], name.replace("_", "-")
    return typer.Option(None, f"--{word}/--no-{word}", help=_help(name, rule), rich_help_panel=rule.group)


def _alias(flag: str, *, is_switch: bool = False) -> Any:
    """Another tool's spelling, accepted and not advertised."""
    return typer.Option(None, flag, hidden=True, is_flag=True if is_switch else None)


def _metavar(rule: Rule) -> str:
    return {int: "N", float: "NUMBER", str: "NAME"}.get(rule.kinds[-1], "VALUE")


def _help(name: str, rule: Rule) -> str:
    default = getattr(DistributedConfig, name, None)
    if default is None or isinstance(default, bool) or "default:" in rule.help:
        return rule.help
    return f"{rule.help} (default: {f'{default:g}' if isinstance(default, float) else default})"


# fmt: off
def train(
    context: typer.Context,
    script: str | None = typer.Option(None, "--script", metavar="FILE", help="the script, run as __main__ by every worker; its own arguments follow after --", rich_help_panel=_RUN),
    config: str | None = typer.Option(None, "--config", metavar="FILE", help="settings from a YAML file, weaker than code and flags", rich_help_panel=_RUN),
    set_: list[str] | None = typer.Option(None, "--set", metavar="KEY=VALUE", help="any other setting or backend option, such as ddp.bucket_cap_mb=50; may be repeated", rich_help_panel=_RUN),
    run_dir: str | None = typer.Option(None, "--run-dir", metavar="DIR", help="where everything of the run goes (default: runs/SCRIPT-TIME-ID)", rich_help_panel=_RUN),
    resume: bool = typer.Option(False, "--resume", help="go on from the newest checkpoint of --run-dir", rich_help_panel=_RUN),
    dry_run: bool = typer.Option(False, "--dry-run", help="print settings, batch equation and launch plan, then stop", rich_help_panel=_RUN),

    backend: str | None = _flag("backend"),
    nproc_per_node: str | None = _flag("nproc_per_node"),
    num_gpus: str | None = _flag("num_gpus"),
    num_nodes: str | None = _flag("num_nodes"),
    gpus_per_node: str | None = _flag("gpus_per_node"),
    device: str | None = _flag("device"),
    node_rank: str | None = _flag("node_rank"),
    master_addr: str | None = _flag("master_addr", "HOST"),
    master_port: str | None = _flag("master_port", "PORT"),
    address: str | None = _flag("address"),

    epochs: str | None = _flag("epochs"),
    max_steps: str | None = _flag("max_steps"),
    batch_size: str | None = _flag("batch_size"),
    global_batch_size: str | None = _flag("global_batch_size"),
    gradient_accumulation_steps: str | None = _flag("gradient_accumulation_steps"),
    seed: str | None = _flag("seed"),
    deterministic: bool | None = _switch("deterministic"),
    shuffle: bool | None = _switch("shuffle"),
    dtype: str | None = _flag("dtype"),
    early_stopping_patience: str | None = _flag("early_stopping_patience"),
    monitor: str | None = _flag("monitor"),
    monitor_mode: str | None = _flag("monitor_mode"),

    learning_rate: str | None = _flag("learning_rate"),
    lr_scaling: str | None = _flag("lr_scaling"),
    gradient_clipping: str | None = _flag("gradient_clipping"),
    mixed_precision: str | None = _flag("mixed_precision", "no|fp16|bf16"),
    scaler_init_scale: str | None = _flag("scaler_init_scale"),
    scaler_growth_interval: str | None = _flag("scaler_growth_interval"),
    activation_checkpointing: bool | None = _switch("activation_checkpointing"),
    compile_: bool | None = _switch("compile"),

    communication_backend: str | None = _flag("communication_backend"),

    checkpoint_dir: str | None = _flag("checkpoint_dir", "DIR"),
    resume_from_checkpoint: str | None = _flag("resume_from_checkpoint", "true|PATH"),
    checkpoint_frequency: str | None = _flag("checkpoint_frequency"),
    checkpoint_every_n_steps: str | None = _flag("checkpoint_every_n_steps"),
    checkpoint_every_s: str | None = _flag("checkpoint_every_s"),
    keep_latest_k: str | None = _flag("keep_latest_k"),
    keep_best: bool | None = _switch("keep_best"),

    log_every_n_steps: str | None = _flag("log_every_n_steps"),
    verbose: bool | None = _switch("verbose"),
    mlflow_tracking: bool | None = _switch("mlflow_tracking"),
    mlflow_experiment: str | None = _flag("mlflow_experiment"),
    tensorboard: bool | None = _switch("tensorboard"),
    tensorboard_dir: str | None = _flag("tensorboard_dir", "DIR"),

    max_restarts: str | None = _flag("max_restarts"),
    restart_on_exception: bool | None = _switch("restart_on_exception"),
    nan_policy: str | None = _flag("nan_policy"),

    world_size: str | None = _alias("--world-size"),
    rank: str | None = _alias("--rank"),
    no_nccl: bool | None = _alias("--no-nccl", is_switch=True),
    save_interval: str | None = _alias("--save-interval"),
    gradient_clip_norm: str | None = _alias("--gradient-clip-norm"),
    gradient_checkpointing: bool | None = _alias("--gradient-checkpointing", is_switch=True),
    use_gradient_checkpointing: bool | None = _alias("--use-gradient-checkpointing", is_switch=True),
    bucket_size_mb: str | None = _alias("--bucket-size-mb"),
    bucket_cap_mb: str | None = _alias("--bucket-cap-mb"),
    find_unused_parameters: bool | None = _alias("--find-unused-parameters", is_switch=True),
    static_graph: bool | None = _alias("--static-graph", is_switch=True),
) -> int:
    # fmt: on
    """Run a script on one or many processes.

    A script that uses the Trainer follows these settings; any other script finds the environment that torchrun gives.
    """
    given = {name.rstrip("_"): value for name, value in locals().items() if value is not None and name != "context"}
    command = {name: given.pop(name, None) for name in ("script", "config", "set", "run_dir", "resume", "dry_run")}
    typed = read_typed(command["config"], given, command["set"] or (), command["script"], context.obj or ())
    from distributed.cli.start import start

    return start(typed, run_dir=command["run_dir"], resume=command["resume"], dry_run=command["dry_run"])


def read_typed(
    config: str | None, flags: Mapping[str, Any], assignments: Iterable[str], script: str | None, script_args: tuple[str, ...]
) -> Typed:
    """Everything that was typed, under its own names. Raises ConfigError for the first wrong or unknown one."""
    base = read_config_file(config) if config is not None else Typed()
    values, notices = canonical({name: _value(name, text) for name, text in flags.items()})
    extra, more = canonical(dict(_assignment(text) for text in assignments))
    merged_flags = _join(_join(base.flag, values), extra)
    is_same = script is None or script == base.script
    return dataclasses.replace(
        base, flag=merged_flags, notices=(*base.notices, *notices, *more), script=script or base.script,
        script_args=script_args or (base.script_args if is_same else ()),
    )  # fmt: skip


def _join(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(weak)
    for name, value in strong.items():
        old = joined.get(name)
        joined[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return joined


def _value(name: str, text: Any) -> Any:
    """A flag's text in the setting's type where it can be read as that; else the text, which the check will refuse."""
    rule = _RULES.get(name)
    if not isinstance(text, str):
        return text
    if rule is None or (bool in rule.kinds and text in ("true", "false")):
        return _yaml(name, text)
    for kind in (kind for kind in rule.kinds if kind in (int, float)):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {text!r} has no KEY=VALUE form: write --set ddp.bucket_cap_mb=50")
    return name.strip(), _yaml(name, value)


def _yaml(name: str, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{name}={text!r} is not YAML: quote it, as in --set '{name}=\"text\"'") from None

