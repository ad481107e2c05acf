"""Reads the pickles of the family without unpickling: no file can make this code call anything.

A pickle is a program for a small stack machine. This module interprets only the instructions that a pickled
tokenizer and a ``torch.save`` archive use, and only on plain values. A global is looked up by name among builders of
ours and never imported, so the worst that a hostile file achieves is to be refused.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.errors import UserError

#: Largest pickle that is read, in bytes; real ones stay under 10 MB (tensors lie outside of them).
MAX_PICKLE_BYTES = 32 << 20

#: Most instructions that are followed, a second's work; a tokenizer of 200,000 tokens has 600,000 of them.
MAX_INSTRUCTIONS = 1_000_000

#: Tuples in tuples are followed this deep; real files nest three.
MAX_DEPTH = 32

#: What may be built, by the name of its global.
Builders = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class EncodingData:
    """What a pickled ``tiktoken.Encoding`` holds."""

    pattern: str
    mergeable_ranks: dict[bytes, int]
    special_tokens: dict[str, int]


def read_encoding(path: Path) -> EncodingData:
    """Read a ``tokenizer.pkl``: one pickled ``tiktoken.core.Encoding``.

    Raises:
        UserError: when the file is absent, damaged, or holds anything else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PICKLE_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    found = interpret(data, path, {"tiktoken.core.Encoding": _Encoding})
    if not isinstance(found, _Encoding) or found.state is None:
        raise UserError(f"{path} does not hold a tiktoken encoding: is it the family's tokenizer.pkl?")
    try:
        return found.data()
    except Refused as error:
        raise _refusal(path, error) from None


class Refused(Exception):
    """Why a file is read no further."""


@dataclass(frozen=True)
class Global:
    """A class or function, of which only the name is ever known."""

    name: str


class _Encoding:
    """Stands in for ``tiktoken.core.Encoding``: made empty, then given its state."""

    def __init__(self) -> None:
        self.state: Any = None

    def data(self) -> EncodingData:
        """Its state, checked: once, at the end, so that a file cannot ask for it again and again."""
        state = self.state
        names = {"name": str, "pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}
        if not isinstance(state, dict) or {name: type(value) for name, value in state.items()} != names:
            raise Refused("its encoding does not hold exactly name, pattern, ranks and special tokens")
        ranks, specials = state["mergeable_ranks"], state["special_tokens"]
        if not (_all_of(ranks, bytes) and _all_of(specials, str)):
            raise Refused("its encoding maps other things than tokens to ids")
        return EncodingData(state["pat_str"], ranks, specials)


def _all_of(ids: dict[Any, Any], key_type: type) -> bool:
    """Whether a dict maps ``key_type`` to whole numbers from 0 on."""
    return all(type(key) is key_type and type(value) is int and value >= 0 for key, value in ids.items())


def interpret(
    data: bytes,
    path: Path,
    builders: Builders,
    load_storage: Callable[[Any], object] | None = None,
) -> Any:
    """Interpret a pickle found in ``path``; see :class:`_Machine`."""
    machine = _Machine(builders, load_storage)
    try:
        if len(data) > MAX_PICKLE_BYTES:
            raise Refused(f"its pickle is larger than {MAX_PICKLE_BYTES >> 20} MiB")
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data), start=1):
            if opcode.name == "STOP":
                return machine.pop()
            if count > MAX_INSTRUCTIONS:
                raise Refused(f"its pickle has more than {MAX_INSTRUCTIONS:,} instructions")
            machine.step(opcode.name, argument)
        raise Refused("its pickle ends early")
    except Refused as error:
        raise _refusal(path, error) from None
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RuntimeError, struct.error) as error:
        what = str(error).partition("\n")[0][:100]
        raise UserError(f"{path} holds no sound pickle ({type(error).__name__}: {what}): copy it again") from None


def _refusal(path: Path, reason: Refused) -> UserError:
    return UserError(f"{path} is refused: {reason}; get the file from a source you trust")


class _Mark:
    """Where a run of items begins on the stack."""


class _Machine:
    """The stack machine, without any instruction that could reach Python's own objects.

    Args:
        builders: what may be built, by the name of its global.
        load_storage: resolves the persistent ids of an archive.
    """

    def __init__(self, builders: Builders, load_storage: Callable[[Any], object] | None) -> None:
        self.builders = builders
        self.load_storage = load_storage
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        #: How deep a tuple nests others, by its identity; one that is gone leaves its number to the next.
        self.depths: dict[int, int] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one instruction, by its name in :mod:`pickletools`."""
        push = self.stack.append
        match name:
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                push({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                push(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8" | "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                push(argument)
            case "MARK":
                push(_Mark)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                push({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                push(self.tuple_of([self.pop() for _ in range(int(name[-1]))][::-1]))
            case "TUPLE":
                push(self.tuple_of(self.pop_to_mark()))
            case "APPEND" | "APPENDS":
                items = self.pop_to_mark() if name == "APPENDS" else [self.pop()]
                self.top(list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self.pop_to_mark() if name == "SETITEMS" else [self.pop(), self.pop()][::-1]
                self.set_items(items)
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.top(object)
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.top(object)
            case "BINGET" | "LONG_BINGET":
                push(self.memo[argument])
            case "GLOBAL":
                push(self.find(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                attribute, module = self.pop(), self.pop()
                if type(module) is not str or type(attribute) is not str:
                    raise Refused("it asks for a global by something else than its name")
                push(self.find(f"{module}.{attribute}"))
            case "REDUCE" | "NEWOBJ":
                arguments, builder = self.pop(), self.pop()
                push(self.build(builder, arguments))
            case "BUILD":
                state = self.pop()
                self.set_state(state)
            case "BINPERSID" if self.load_storage is not None:
                push(self.load_storage(self.pop()))
            case _:
                raise Refused(f"it uses the pickle instruction {name}, which such files never need")

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _Mark:
            raise Refused("its pickle is malformed")
        return value

    def pop_to_mark(self) -> list[Any]:
        items = []
        while (value := self.stack.pop()) is not _Mark:
            items.append(value)
        return items[::-1]

    def tuple_of(self, items: list[Any]) -> tuple[Any, ...]:
        made = tuple(items)
        depth = 1 + max((self.depths.get(id(item), 0) for item in items if type(item) is tuple), default=0)
        if depth > MAX_DEPTH:
            raise Refused(f"it nests tuples more than {MAX_DEPTH} deep")
        self.depths[id(made)] = depth
        return made

    def top(self, kind: type) -> Any:
        """The topmost value, which must be of this very type (``object``: of any)."""
        value = self.stack[-1]
        if value is _Mark or (kind is not object and type(value) is not kind):
            raise Refused("its pickle is malformed")
        return value

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Nested keys are never needed, and hashing deep ones can overflow the interpreter's own stack.
            if not isinstance(key, (str, bytes, int)):
                raise Refused(f"it has a dict key of type {type(key).__name__}")
            target[key] = value

    def find(self, name: str) -> Global:
        if name not in self.builders:
            raise Refused(f"it asks for {name[:100]!r}, which may not be built")
        return Global(name)

    def build(self, builder: Any, arguments: Any) -> Any:
        if not isinstance(builder, Global) or not isinstance(arguments, tuple):
            raise Refused("it calls something that is not a known name")
        if builder.name == "collections.OrderedDict" and arguments:
            raise Refused("it fills an OrderedDict in an unknown way")
        return self.builders[builder.name](*arguments)

    def set_state(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, _Encoding) and target.state is None:
            target.state = state
        # A state_dict carries the versions of its modules as an attribute; nobody needs them.
        elif not (type(target) is dict and type(state) is dict and set(state) == {"_metadata"}):
            raise Refused(f"it sets attributes of a {type(target).__name__}")


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read ({error.strerror or error}): check the folder")
