"""A loaded model with its tokenizer: generate and chat from Python.

``nanochat.load("demo").chat("Hello!")``; the subcommands generate, chat and evaluate stand on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat import checkpoint
from nanochat.checkpoint import Checkpoint
from nanochat.data.conversation import render_for_completion
from nanochat.errors import UserError
from nanochat.hardware import detect
from nanochat.hardware.device import Device, compute_dtype
from nanochat.inference.batch import generate_batch
from nanochat.inference.generate import generate
from nanochat.inference.tools import Piece, PythonTool, content, pieces, shown
from nanochat.model.gpt import GPT
from nanochat.paths import CHECKPOINT_FOLDERS, Source, base_folder
from nanochat.tokenizer import store
from nanochat.tokenizer.bpe import Tokenizer

Message = dict[str, Any]


@dataclass(frozen=True)
class Generation:
    """Token ids of prompt and answer together, and the answer as text.

    Attributes:
        content: of the answer, as an assistant's message has it: a string, or parts where the calculator was used,
            which ``text`` shows as ``[60+33 = 93]``.
    """

    ids: list[int]
    text: str
    content: str | list[dict[str, Any]]


@dataclass(frozen=True)
class Session:
    """A model ready to use.

    Attributes:
        source: which stage made it: base, sft or rl.
        saved: its checkpoint's manifest, without the tensors.
        folder: where the checkpoint lies.
    """

    model: GPT
    tokenizer: Tokenizer
    device: Device
    source: Source
    saved: Checkpoint
    folder: Path

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({self.tokenizer.bos_id, self.tokenizer.special_id("<|assistant_end|>")})

    @property
    def uses_tool(self) -> bool:
        """Whether the model was taught to use the calculator: sft and rl are, base is not."""
        return self.source != "base"

    def prompt_ids(self, text: str) -> list[int]:
        """Raw text after bos for a base model, one user message for sft and rl."""
        if self.source == "base":
            return [self.tokenizer.bos_id, *self.tokenizer.encode(text)]
        return self._chat_ids([{"role": "user", "content": text}])

    def generate(
        self, prompt: str, *, temperature: float = 0.0, top_k: int = 0, max_tokens: int = 256, seed: int = 0
    ) -> Generation:
        """Continue a text (base) or answer one message (sft, rl)."""
        ids = self.prompt_ids(prompt)
        return self._generation(ids, list(self._tokens(ids, temperature, top_k, max_tokens, seed)))

    def _generation(self, ids: list[int], answer: list[int]) -> Generation:
        said = list(self._pieces(iter(answer)))
        return Generation(ids + answer, "".join(shown(said)), content(said))

    def generate_many(
        self, prompts: Sequence[str], *, max_tokens: int = 256, batch_size: int = 32
    ) -> Iterator[tuple[int, Generation]]:
        """The likeliest answer to each prompt, as :meth:`generate` gives it, several at a time: much faster.

        Args:
            batch_size: prompts at a time at most; those of one length are answered together.

        Yields:
            A prompt's number and its answer, in the order in which they come.
        """
        asked = [self.prompt_ids(prompt) for prompt in prompts]
        of_length: dict[int, list[int]] = {}
        for number, ids in enumerate(asked):
            of_length.setdefault(len(ids), []).append(number)
        for numbers in of_length.values():
            for start in range(0, len(numbers), batch_size):
                batch = numbers[start : start + batch_size]
                tools = [PythonTool(self.tokenizer) for _ in batch] if self.uses_tool else None
                answers = generate_batch(
                    self.model,
                    [asked[number] for number in batch],
                    max_tokens=max_tokens,
                    stop_ids=self.stop_ids,
                    tools=tools,
                )
                for number, answer in zip(batch, answers, strict=True):
                    yield number, self._generation(asked[number], answer)

    def chat(
        self,
        text: str | Sequence[Message],
        *,
        temperature: float = 0.6,
        top_k: int = 50,
        max_tokens: int = 256,
        seed: int = 0,
    ) -> str:
        """The answer to a message, or to a conversation that ends with a user's message."""
        return "".join(self.stream_chat(text, temperature=temperature, top_k=top_k, max_tokens=max_tokens, seed=seed))

    def stream_chat(
        self,
        text: str | Sequence[Message],
        *,
        temperature: float = 0.6,
        top_k: int = 50,
        max_tokens: int = 256,
        seed: int = 0,
    ) -> Iterator[str]:
        """Like :meth:`chat`, piece by piece; a piece never ends inside a character."""
        yield from shown(
            self.stream_pieces(text, temperature=temperature, top_k=top_k, max_tokens=max_tokens, seed=seed)
        )

    def stream_pieces(
        self,
        text: str | Sequence[Message],
        *,
        temperature: float = 0.6,
        top_k: int = 50,
        max_tokens: int = 256,
        seed: int = 0,
    ) -> Iterator[Piece]:
        """Like :meth:`stream_chat`, with what the calculator was asked and said apart from the text.

        :func:`nanochat.inference.tools.content` makes a message of the pieces, for the next turn of the conversation.
        """
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        tokens = self._tokens(self._chat_ids(messages), temperature, top_k, max_tokens, seed)
        yield from self._pieces(tokens)

    def fit(self, messages: Sequence[Message], max_tokens: int) -> tuple[list[Message], int]:
        """Drop the oldest whole turns until the conversation and its answer fit the trained length.

        Returns:
            The messages kept, and how many were dropped.

        Raises:
            UserError: when the last message alone is too long.
        """
        kept = list(messages)
        room = self.model.config.sequence_len - min(max_tokens, self.model.config.sequence_len // 2)
        while len(self._chat_ids(kept)) > room:
            # A leading system message stays; a turn is a user's message with its answer.
            first = 1 if kept[0]["role"] == "system" else 0
            if len(kept) - first < 3:
                raise UserError(
                    f"the message is {len(self._chat_ids(kept)):,} tokens long and there is room for {room:,}:"
                    " shorten it, or lower --max-tokens"
                )
            del kept[first : first + 2]
        return kept, len(messages) - len(kept)

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        # The rendering drops the last assistant message: the one that is asked for.
        asked = [*messages, {"role": "assistant", "content": ""}]
        return render_for_completion({"messages": asked}, self.tokenizer)

    def _tokens(self, ids: list[int], temperature: float, top_k: int, max_tokens: int, seed: int) -> Iterator[int]:
        return generate(
            self.model,
            ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            stop_ids=self.stop_ids,
            tool=PythonTool(self.tokenizer) if self.uses_tool else None,
        )

    def _pieces(self, tokens: Iterator[int]) -> Iterator[Piece]:
        if self.uses_tool:
            return pieces(self.tokenizer, tokens)
        return (Piece("text", piece) for piece in decode_pieces(self.tokenizer, tokens))


def decode_pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Text of a stream of tokens; bytes of an unfinished character wait for the rest of it."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if piece := decoder.decode(tokenizer.decode_bytes([token])):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest


def build_model(saved: Checkpoint, device: Device, dtype: torch.dtype | None = None) -> GPT:
    """The model of a checkpoint, on a device; in the dtype that device computes in, when none is given."""
    with torch.device("meta"):
        model = GPT(saved.model_config)
    try:
        model.load_state_dict(saved.parameters, strict=True, assign=True)
    except RuntimeError:
        raise UserError(
            f"the {saved.stage} checkpoint of step {saved.step} is damaged: its tensors are not those of the model that"
            " its manifest describes; use another step, or import it again"
        ) from None
    model.to(device.torch_device)
    model.set_compute_dtype(dtype or compute_dtype(device)[0])
    return model


def open_session(
    tag: str | None = None,
    *,
    source: str | None = None,
    step: int | None = None,
    device: str | None = None,
    tokenizer: str | None = None,
    base: Path | None = None,
) -> Session:
    """Load a model; see :func:`nanochat.load`."""
    base = base or base_folder()
    stage = _stage(source, tag, base)
    folder = checkpoint.find(stage, tag, step, base)
    on = detect(device)
    saved = checkpoint.load(folder)
    opened = tokenizer_of(saved, folder, base, tokenizer)
    model = build_model(saved, on)
    model.requires_grad_(False)
    return Session(model, opened, on, stage, saved, folder)


def setting_of(saved: Checkpoint, name: str) -> Any:
    """A setting of the run that made a checkpoint, wherever its config (or the family's) has it; else None."""
    sources: list[Any] = [saved.config, saved.family or {}]
    while sources:
        source = sources.pop(0)
        if name in source and source[name] is not None:
            return source[name]
        sources += [value for value in source.values() if isinstance(value, Mapping)]
    return None


def tokenizer_of(saved: Checkpoint, folder: Path, base: Path, name_or_path: str | None = None) -> Tokenizer:
    """The tokenizer a checkpoint (in ``folder``) belongs to; ``name_or_path`` may name where it lies.

    Raises:
        UserError: when it is not to be found, or the one named is another.
    """
    reference = saved.tokenizer
    if reference is None:
        raise UserError(f"checkpoint {folder} does not say which tokenizer it belongs to: import or train it again")
    if name_or_path is None:
        return store.find_tokenizer(reference.fingerprint, reference.path, base)[0]
    opened, path = store.open_tokenizer(name_or_path, base)
    store.check_belongs(opened, path, reference.fingerprint, folder)
    return opened


def _stage(source: str | None, tag: str | None, base: Path) -> Source:
    """The stage asked for, else the last one that has checkpoints (of that tag)."""
    if source is not None:
        if source not in CHECKPOINT_FOLDERS:
            raise UserError(f"source {source!r} is not known: choose one of {', '.join(CHECKPOINT_FOLDERS)}")
        return source
    for stage in reversed(CHECKPOINT_FOLDERS):
        if (base / CHECKPOINT_FOLDERS[stage] / (tag or ".")).is_dir():
            return stage
    return "base"
