"""Merge defaults < config file < sweep < code < flags into one DistributedConfig, with the source of each value."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.config.fields import in_file, rules
from distributed.config.peers import answer_for
from distributed.config.registry import backend_row
from distributed.config.settings import ALIASES, GROUPS, SWEEP_ALIASES, DistributedConfig, canonical, check_setting
from distributed.config.unique_names import read_unique
from distributed.errors import ConfigError, nearest


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Settings from outside the script, by flags and a config file, and the script. They are passed on to the workers."""

    file: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flag: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notices: tuple[str, ...] = ()
    script: str | None = None
    script_args: tuple[str, ...] = ()
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other values of a sweep


@dataclasses.dataclass(frozen=True)
class MergedConfig:
    """The configuration of a run with the source of every value: "default", "file", "sweep", "code" or "flag".

    A run's config.yaml also has the sources "loader" and "derived", for batch sizes that come from the training data or
    the batch equation, and "launcher", for processes that another launcher started.
    """

    config: DistributedConfig
    sources: Mapping[str, str]
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def source(self, name: str) -> str:
        """Return the source of the value of `name`."""
        return self.sources.get(name, "default")

    def is_given(self, name: str) -> bool:
        """Return whether `name` was set in any source."""
        return name in self.sources

    def is_overruled(self, name: str, by: str) -> bool:
        """Return whether `by`, on which `name` depends, was set in a stronger source than `name`.

        The two then do not contradict.
        """
        layers = ("default", "file", "sweep", "code", "flag")
        return layers.index(self.source(by)) > layers.index(self.source(name))


def merge(
    overrides: Overrides,
    code: Mapping[str, Any],
    hyperparameters: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
) -> MergedConfig:
    """Return one checked configuration out of all sources.

    Args:
        overrides: settings from the config file (the weakest source) and from flags (the strongest).
        code: settings in the script.
        hyperparameters: values of a sweep that are not settings. They are recorded.
        sweep: settings in the dict of a sweep. They are weaker than `code`.

    Raises:
        ConfigError: a name or a value is wrong, or the options of the backend contradict a setting.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notices = list(overrides.notices)
    for layer, given in (("file", overrides.file), ("sweep", sweep or {}), ("code", code), ("flag", overrides.flag)):
        for name, value in given.items():
            if name in GROUPS and isinstance(value, Mapping):
                values[name] = {**values.get(name, {}), **value}
                sources.update({f"{name}.{option}": layer for option in value})
                sources[name] = layer
            else:
                values[name] = value
                sources[name] = layer
    return _with_implied(
        MergedConfig(
            DistributedConfig(**values),
            sources,
            {**overrides.hyperparameters, **(hyperparameters or {})},
            tuple(notices),
        )
    )


def _with_implied(merged: MergedConfig) -> MergedConfig:
    """Return `merged` with the settings that options of the backend imply, such as those in DeepSpeed's config file.

    Raises ConfigError if a setting contradicts them.
    """
    if merged.config.backend is None:
        return merged
    group = backend_row(merged.config.backend).group
    options = merged.config.options(group)
    values: dict[str, Any] = {}
    for where, name, value in options.implied() if hasattr(options, "implied") else ():
        ours = getattr(merged.config, name)
        if merged.is_given(name) and ours is not None and ours != value:
            raise ConfigError(
                f"{name}={ours!r} ({merged.source(name)}) is not {where}: make them agree, set 'auto' there, or drop one"
            )
        values[name] = value
    if not values:
        return merged
    sources = {**dict.fromkeys(values, merged.source(group)), **merged.sources}
    return dataclasses.replace(merged, config=dataclasses.replace(merged.config, **values), sources=sources)


def for_evaluation(merged: MergedConfig) -> MergedConfig:
    """Return the settings without those that change the user's model and optimizer for training.

    The workers apply these.
    """
    config = dataclasses.replace(merged.config, lr_scaling="none", activation_checkpointing=False, compile=False)
    return dataclasses.replace(merged, config=config)


def joined(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings merged, including groups of options. `strong` wins where they disagree."""
    both = dict(weak)
    for name, value in strong.items():
        old = both.get(name)
        both[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def split_sweep(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return (settings, other hyperparameters, warnings) of a plain dict from a sweep.

    Near-misses of settings give warnings.
    """
    known = DistributedConfig.__dataclass_fields__
    fields: dict[str, Any] = {}
    others: dict[str, Any] = {}
    warnings = []
    for name, value in values.items():
        if name in SWEEP_ALIASES or name in known or name in ALIASES or name.partition(".")[0] in GROUPS:
            fields[SWEEP_ALIASES.get(name, name)] = value
        else:
            others[name] = value
            answer = answer_for(name) or ""
            if close := f" ({answer})" if answer.startswith("use ") else nearest(name, known):
                warnings.append(f"config has {name!r}, which is not a setting{close}: kept as a hyperparameter")
    settings, notices = canonical(fields)
    return settings, others, warnings + notices


# ------------------------------------------------------------------ files


def read_config_file(path: str | os.PathLike[str]) -> Overrides:
    """Return the settings in a YAML file. The config.yaml of a run also says which values were flags, and its script.

    Raises ConfigError with the file and the line for unreadable YAML, a wrong name or a wrong value.
    """
    content, lines = _read_yaml(Path(path))
    sources = _popped(content, "sources", dict, path) or {}
    script = _popped(content, "script", str, path)
    arguments = _popped(content, "script_args", list, path) or []
    content.pop("hyperparameters", None)
    if sources:  # written by a run: its defaults stay defaults and its flags stay flags
        content = _only_given(content, sources)
    _check(content, lines, path)
    settings, notices = canonical(content)
    flags: dict[str, Any] = {}
    for name in [name for name in settings if sources.get(name) == "flag" and name not in GROUPS]:
        flags[name] = settings.pop(name)
    for group in [name for name in settings if name in GROUPS]:
        strong = {o: v for o, v in settings[group].items() if sources.get(f"{group}.{o}") == "flag"}
        if strong:
            flags[group] = strong
    return Overrides(settings, flags, tuple(notices), script, tuple(map(str, arguments)))


def _check(content: Mapping[str, Any], lines: Mapping[str, int], path: str | os.PathLike[str]) -> None:
    """Check names and values one by one. Rules about several settings are checked after merging."""
    known = rules(DistributedConfig)
    for name, value in content.items():
        is_group = name in GROUPS and isinstance(value, Mapping)
        for one, of_it in ((f"{name}.{o}", v) for o, v in value.items()) if is_group else ((name, value),):
            try:
                for field, checked in canonical({one: of_it}, written=in_file)[0].items():
                    check_setting(field, checked, known[field], in_file)
            except ConfigError as error:
                where = f", line {lines[one]}" if one in lines else ""
                raise ConfigError(f"config file {str(path)!r}{where}: {error}") from None


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (content, line of each name) of a YAML file. The options of a group have dotted names in the second."""
    import yaml

    file = f"config file {str(path)!r}"
    try:
        content, lines = read_unique(path, file)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "no text"
        raise ConfigError(f"{file}{where} is not YAML ({problem}): write 'name: value' lines") from None
    if content is None:
        return {}, {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{file} is not a mapping: write 'name: value' lines")
    return content, lines


def _popped(content: dict[str, Any], name: str, kind: type, path: str | os.PathLike[str]) -> Any:
    """Remove and return the entry `name`, which a run wrote beside the settings; None if it is missing."""
    value = content.pop(name, None)
    if value is not None and not isinstance(value, kind):
        raise ConfigError(
            f"config file {str(path)!r}: {name}={value!r} does not have the form in which a run writes it: drop it"
        )
    return value


def _only_given(content: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return `content` without defaults and without values that the loader and the batch equation determine again."""
    return {name: value for name, value in content.items() if sources.get(name, "loader") not in ("loader", "derived")}


def config_yaml(merged: MergedConfig, script: str | None = None, script_args: tuple[str, ...] = ()) -> str:
    """Return the text of a run's config.yaml, which `--config` reads. The source of every value is its comment.

    Args:
        merged: the settings with their sources.
        script: the script of the run, or None for a notebook or `python -m`.
        script_args: the arguments of the script.
    """
    import yaml

    def block(content: Mapping[str, Any]) -> str:
        return yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=False, allow_unicode=True)

    again = "python -m distributed.cli train --config THIS --run-dir NEW"
    if script is None:  # a notebook or `python -m`
        again = 'Trainer(model, config="THIS")'
    lines = [f"# The settings of this run. Start it again: {again}\n"]
    if script is not None:
        lines.append(block({"script": script, "script_args": list(script_args)}))
    for name, value in merged.config.to_dict().items():
        text = block({name: value}).rstrip("\n")
        first, _, rest = text.partition("\n")
        lines.append(f"{first}  # {merged.source(name)}\n" + (rest + "\n" if rest else ""))
    if merged.hyperparameters:
        lines.append(block({"hyperparameters": {k: _plain(v) for k, v in merged.hyperparameters.items()}}))
    lines.append(block({"sources": dict(merged.sources)}))
    return "".join(lines)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
