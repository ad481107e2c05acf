"""``nanochat chat``: answer given messages, or hold a dialogue in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from nanochat.context import Context, Result
from nanochat.errors import UserError
from nanochat.inference.session import Message, Session, open_session
from nanochat.inference.tools import Piece, content, shown
from nanochat.stages.configs import ChatConfig
from nanochat.stages.settings import Sampling


def run(config: ChatConfig, context: Context) -> Result | None:
    """Answer each message as a conversation of its own; without messages, talk until Ctrl-D."""
    if not config.prompt and config.json:
        raise UserError("chat --json answers given messages: add -p TEXT")
    session = open_session(
        config.model_tag,
        source=config.source,
        step=config.step,
        device=config.device,
        tokenizer=config.tokenizer,
        base=context.base,
    )
    if not config.prompt:
        dialogue(session, config.sampling)
        return None
    answers = [answer(session, prompt, config.sampling) for prompt in config.prompt]
    texts = ["".join(shown(said)) for said in answers]
    if len(answers) == 1:
        text = texts[0]
    else:
        text = "\n\n".join(f"> {prompt}\n{said}" for prompt, said in zip(config.prompt, texts, strict=True))
    told = [
        {"prompt": prompt, "text": said, "content": content(pieces)}
        for prompt, said, pieces in zip(config.prompt, texts, answers, strict=True)
    ]
    values: dict[str, Any] = told[0] if len(told) == 1 else {"answers": told}
    return Result(values, text)


def answer(session: Session, prompt: str, sampling: Sampling) -> list[Piece]:
    """The answer to one message."""
    messages, _ = session.fit([{"role": "user", "content": prompt}], sampling.max_tokens)
    return list(_stream(session, messages, sampling, sampling.seed))


def _stream(session: Session, messages: list[Message], sampling: Sampling, seed: int) -> Iterator[Piece]:
    return session.stream_pieces(
        messages,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
    )


def dialogue(session: Session, sampling: Sampling) -> None:
    """Talk in the terminal; Ctrl-C stops an answer, ``/new`` begins anew, Ctrl-D or ``/quit`` ends."""
    run = session.folder.parent.name
    print(f"{run}, step {session.saved.step}. /new begins anew; /quit or Ctrl-D ends; Ctrl-C stops an answer.")
    messages: list[Message] = []
    turn = 0
    while True:
        try:
            text = input("\nyou   ").strip()
        except (EOFError, KeyboardInterrupt, RuntimeError):  # the last: there is no stdin at all
            print()
            return
        if text == "/quit":
            return
        if text == "/new":
            messages = []
            continue
        if not text:
            continue
        try:
            kept, dropped = session.fit([*messages, {"role": "user", "content": text}], sampling.max_tokens)
        except UserError as error:
            print(f"      ({error})", file=sys.stderr)
            continue
        if dropped:
            print(f"      (the {dropped} oldest messages no longer fit and were dropped)", file=sys.stderr)
        said = _speak(session, kept, sampling, turn)
        messages = [*kept, {"role": "assistant", "content": said}]
        turn += 1


def _speak(session: Session, messages: list[Message], sampling: Sampling, turn: int) -> str | list[dict[str, Any]]:
    """Print an answer piece by piece and return it as a message's content; Ctrl-C keeps what has been said so far."""
    said: list[Piece] = []

    def listening() -> Iterator[Piece]:
        for piece in _stream(session, messages, sampling, sampling.seed + turn):
            said.append(piece)
            yield piece

    print("model ", end="", flush=True)
    try:
        for text in shown(listening()):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    print()
    return content(said)
