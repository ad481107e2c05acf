"""The command line. Parses before anything heavy is imported; a user's mistake is one sentence, exit code 2."""

from __future__ import annotations

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
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] in ("-V", "--version"):
        from nanochat import __version__

        print(f"{PROGRAM} {__version__}")
        return 0
    try:
        return _run_command(words[0], words[1:])
    except UserError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; nothing is left to say
        return 1


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
