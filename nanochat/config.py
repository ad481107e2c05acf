"""Configs: frozen dataclass ⇄ dict ⇄ flags, strict about unknown names.

Flags are made by ``tyro`` from the dataclasses' fields and the docstrings beneath them. Groups of
fields are nested dataclasses, but their flags carry no prefix: ``--depth``, not ``--model.depth``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nanochat.errors import UserError

Config = TypeVar("Config")

#: Flags whose value may be left away, and what it is then.
BARE_FLAGS = {"--resume": "latest"}


def parse_flags(config_class: type[Config], arguments: Sequence[str], program: str) -> Config:
    """Parse ``arguments`` into a config.

    Raises:
        UserError: for unknown, missing or malformed flags, in one sentence.
        SystemExit: after ``--help``.
    """
    import tyro

    arguments = _complete_bare(arguments)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            config = tyro.cli(
                config_class,
                args=arguments,
                prog=program,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
        return _note_given(config, arguments)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(_one_sentence(box.getvalue(), program)) from None


def _note_given(config: Config, arguments: Sequence[str]) -> Config:
    """Tell a config that can be resumed which settings were given, even where they equal their defaults."""
    continuation = getattr(config, "continuation", None)
    if continuation is None:
        return config
    flags = (word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--"))
    told = dataclasses.replace(continuation, given=tuple(sorted(set(flags))))
    return dataclasses.replace(config, continuation=told)  # type: ignore[type-var]


def _complete_bare(arguments: Sequence[str]) -> list[str]:
    """Give a flag of :data:`BARE_FLAGS` that stands without a value the one it then has."""
    completed: list[str] = []
    for word, following in itertools.zip_longest(arguments, arguments[1:]):
        completed.append(word)
        if word in BARE_FLAGS and (following is None or following.startswith("-")):
            completed.append(BARE_FLAGS[word])
    return completed


def _one_sentence(box: str, program: str) -> str:
    """The message of tyro's error box as one sentence, with what was probably meant.

    The box is a title, then paragraphs between rules, the message first; its border is drawn with
    other characters where the encoding lacks the usual ones.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip(" │|") for line in text.splitlines() if not re.match(r"[╭╰]", line)]
    paragraphs = [" ".join(group) for rule, group in itertools.groupby(lines, _is_rule) if not rule]
    if not re.match(r"\s*╭", text):
        paragraphs = paragraphs[1:]  # without a border the title is a paragraph too
    message = paragraphs[0].rstrip(" .") if paragraphs and paragraphs[0] else "the flags cannot be understood"
    meant = [m.group(0) for line in lines if (m := re.match(r"--[a-z][\w-]+", line))]
    if "nrecognized" in message and meant:
        message += f" (perhaps {' or '.join(dict.fromkeys(meant[:3]))} was meant)"
    return f"{message[0].lower()}{message[1:]}: see {program} --help"


def _is_rule(line: str) -> bool:
    return re.fullmatch(r"[─-]{5,}", line) is not None


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """The flags that say ``values``: ``{"depth": 4, "json": True}`` is ``--depth 4 --json``."""
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False or value is None:
            continue
        elif isinstance(value, (list, tuple)):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain nested values, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(config_class: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """The inverse of :func:`to_dict`.

    Raises:
        UserError: when ``values`` (found at ``where``) hold a name that the config does not have.
    """
    hints = typing.get_type_hints(config_class)
    fields = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - fields):
        raise UserError(f"{where} has settings this version does not know: {', '.join(unknown)}; remove or rename them")
    built: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            value = from_dict(typing.cast("type[Any]", hint), value, where)
        elif _is_tuple(hint) and isinstance(value, list):
            value = tuple(value)
        built[name] = value
    return config_class(**built)


def _is_tuple(hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_is_tuple(part) for part in typing.get_args(hint))
    return typing.get_origin(hint) is tuple
