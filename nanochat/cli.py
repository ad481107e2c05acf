"""The command line. Parses before anything heavy is imported; a user's mistake is one sentence, exit code 2."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from nanochat.commands import COMMANDS
from nanochat.errors import UserError

PROGRAM = "nanochat"


def help_text() -> str:
    """What ``nanochat --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = [
        f"usage: {PROGRAM} COMMAND [FLAGS]",
        "",
        "Train your own small ChatGPT, from raw text to a model you can talk to.",
        "",
    ]
    lines += [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    lines += ["", f"{PROGRAM} COMMAND --help lists the flags of a command; {PROGRAM} run demo tries the whole line."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        _print_anything()
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        _fail("stopped")
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone. What is still buffered must go nowhere, without a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}; check that it is there, its rights, and the room on the disk")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        return _fail("out of memory: choose a smaller model, --device-batch-size or --max-seq-len")


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate; on a processor it says so in words only."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _fail(sentence: str) -> int:
    """Say what went wrong on stderr, where there is one, and return the exit code of a user's mistake."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{PROGRAM}: {sentence}", file=sys.stderr)
    return 2


def _print_anything() -> None:
    """Where the terminal's encoding lacks a character, print another one for it instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] in ("-V", "--version"):
        from nanochat import __version__

        print(f"{PROGRAM} {__version__}")
        return 0
    return _run_command(words[0], words[1:])


def _run_command(name: str, flags: Sequence[str]) -> int:
    if name not in COMMANDS:
        raise UserError(f"there is no command {name!r}: choose one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]

    from nanochat.config import parse_flags

    config = parse_flags(command.config_class(), flags, f"{PROGRAM} {name}")
    stage = command.stage()

    from nanochat.context import Context

    result = stage(config, Context.create())
    if result is not None:
        result.print(as_json=getattr(config, "json", False))
    return 0
