"""Merge defaults < config file < sweep < code < flags into one DistributedConfig, with the source of each value."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from distributed.config.fields import in_file, rules
from distributed.config.peers import answer_for
from distributed.config.reading import read_unique
from distributed.config.registry import backend_entry
from distributed.config.settings import (
    ALIASES,
    GROUPS,
    SWEEP_ALIASES,
    DistributedConfig,
    canonical,
    check_setting,
    without_outranked,
)
from distributed.errors import ConfigError, nearest


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Settings from flags and a config file, and the path and arguments of the script. Passed on to the workers."""

    file: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flag: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notices: tuple[str, ...] = ()
    script: str | None = None
    script_args: tuple[str, ...] = ()
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of a sweep, not settings
    in_call: tuple[str, ...] = ()  # the options among the flags, as GROUP.OPTION, that a call of `launch` has given

    def values(self) -> dict[str, Any]:
        """Return the value of each setting that was given. A flag overrides the file; option groups are merged."""
        return joined(self.file, self.flag)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of the setting `name` as it was given, or `default` if it was not."""
        return self.values().get(name, default)

    def only(self, names: Collection[str]) -> Overrides:
        """Return the settings `names` as far as they were given, without a script."""
        file, flag = ({n: v for n, v in layer.items() if n in names} for layer in (self.file, self.flag))
        return Overrides(file, flag)

    def without(self, names: Collection[str]) -> Overrides:
        """Return these overrides without the settings `names`."""
        kept = self.only(self.values().keys() - set(names))
        return dataclasses.replace(self, file=kept.file, flag=kept.flag)


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
        """Return whether any source gave `name`."""
        return name in self.sources

    def is_overruled(self, name: str, by: str) -> bool:
        """Return whether the setting `by`, on which the setting `name` depends, was given by a stronger source than `name`.

        If so, `name` has no effect, and the two settings do not contradict each other.
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
        hyperparameters: values of a sweep that are not settings. They are only recorded.
        sweep: settings in the dict of a sweep. They are weaker than `code`.

    Raises:
        ConfigError: a name or a value is wrong, or the options of the backend contradict a setting.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notices = list(overrides.notices)
    for layer, given in (("file", overrides.file), ("sweep", sweep or {}), ("code", code), ("flag", overrides.flag)):
        values, sources = without_outranked(values, given), without_outranked(sources, given)
        for name, value in given.items():
            if name in GROUPS and isinstance(value, Mapping):
                values[name] = {**values.get(name, {}), **value}
                sources.update({f"{name}.{option}": layer for option in value})
                sources[name] = layer
            else:
                values[name] = value
                sources[name] = layer
    merged = _with_implied(
        MergedConfig(
            DistributedConfig(**values),
            sources,
            {**overrides.hyperparameters, **(hyperparameters or {})},
            tuple(notices),
        )
    )
    _refuse_two_starts(merged)
    return merged


def _refuse_two_starts(merged: MergedConfig) -> None:
    weights, source = merged.config.init_from, merged.config.resume_from_checkpoint
    is_overruled = merged.is_overruled("init_from", "resume_from_checkpoint")
    takes_both = (
        merged.config.checkpoint_trainable_only
    )  # the frozen parameters from the one, the others from the other
    if weights is not None and isinstance(source, str) and not (is_overruled or takes_both):
        raise ConfigError(
            f"init_from={weights!r} gives the weights only, and resume_from_checkpoint={source!r} the whole state: drop one of them"
        )


def _with_implied(merged: MergedConfig) -> MergedConfig:
    """Return `merged` with the settings that options of the backend imply, such as those in DeepSpeed's config file.

    Raises ConfigError if a setting contradicts them.
    """
    if merged.config.backend is None:
        return merged
    group = backend_entry(merged.config.backend).group
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

    Only the workers that train apply those.
    """
    config = dataclasses.replace(merged.config, lr_scaling="none", activation_checkpointing=False, compile=False)
    return dataclasses.replace(merged, config=config)


def joined(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings merged, including option groups. `strong` wins where they disagree."""
    both = without_outranked(weak, strong)
    for name, value in strong.items():
        old = both.get(name)
        both[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def split_sweep(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return (settings, other hyperparameters, warnings) of a plain dict from a sweep.

    A name that is close to that of a setting gives a warning.
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
    """Return the settings in a YAML file. The config.yaml of a run also records the values that were flags, and the script.

    Raises ConfigError with the file and the line for unreadable YAML, a wrong name or a wrong value.
    """
    content, lines = _read_yaml(Path(path))
    sources = _popped(content, "sources", dict, path) or {}
    script = _popped(content, "script", str, path)
    arguments = _popped(content, "script_args", list, path) or []
    content.pop("hyperparameters", None)
    if sources:  # a run wrote the file: its defaults stay defaults and its flags stay flags
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
    """Return (content, line of each name) of a YAML file. The line of an option is under its dotted name, GROUP.OPTION."""
    file = f"config file {str(path)!r}"
    content, lines = read_unique(path, file, "'name: value' lines")
    if content is None:
        return {}, {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{file} is not a mapping: write 'name: value' lines")
    return content, lines


def _popped(content: dict[str, Any], name: str, kind: type, path: str | os.PathLike[str]) -> Any:
    """Remove and return the entry `name`, which is not a setting but was written by a run. Return None if it is missing."""
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
    """Return the text of a run's config.yaml, which `--config` reads. A comment on each value names its source.

    Args:
        merged: the settings with their sources.
        script: the script of the run, or None for a notebook or `python -m`.
        script_args: the arguments of the script.
    """
    import yaml

    dumper: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # four times as fast

    def block(content: Mapping[str, Any]) -> str:
        return str(
            yaml.dump(dict(content), Dumper=dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)
        )

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
