"""Results of the calculator are forced into a text, marked, and never the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from golden_text import golden_tokenizer
from torch import Tensor

from nanochat.checkpoint import Checkpoint
from nanochat.data.conversation import render, render_for_completion
from nanochat.hardware import detect
from nanochat.inference.cache import KVCache
from nanochat.inference.generate import Token, generate, generate_tokens
from nanochat.inference.session import Session
from nanochat.inference.tools import Piece, PythonTool, content, pieces, shown
from nanochat.model.config import Constants, ModelConfig
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize

TOKENIZER = golden_tokenizer()
CONFIG = ModelConfig(
    sequence_len=64,
    vocab_size=TOKENIZER.vocab_size,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    model_dim=32,
    window_pattern="SL",
    constants=Constants(short_window=8),
)
PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END, END, BOS = (
    TOKENIZER.special_id(f"<|{name}|>")
    for name in ("python_start", "python_end", "output_start", "output_end", "assistant_end", "bos")
)
SUM = [PYTHON_START, *TOKENIZER.encode("60+33"), PYTHON_END]
RESULT = [OUTPUT_START, *TOKENIZER.encode("93"), OUTPUT_END]


class Scripted(GPT):
    """A model that says what it is told to, one token a call, whatever was forced between."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(CONFIG)
        self.script: Iterator[int] = iter(script)
        self.read: list[list[int]] = []

    def forward(self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:
        assert cache is not None
        cache.advance(ids.size(1))
        self.read.append(ids[0].tolist())
        logits = torch.zeros(1, 1, CONFIG.vocab_size)
        logits[0, 0, next(self.script)] = 1.0
        return logits


def tokens(script: list[int], max_tokens: int = 100, stop_ids: frozenset[int] = frozenset({END})) -> list[Token]:
    return list(
        generate_tokens(Scripted(script), [BOS], max_tokens=max_tokens, stop_ids=stop_ids, tool=PythonTool(TOKENIZER))
    )


def session(script: list[int], source: str = "sft") -> Session:
    saved = Checkpoint(stage=source, step=0, model_config=CONFIG, parameters={})
    return Session(Scripted(script), TOKENIZER, detect("cpu"), source, saved, Path())


def test_a_result_is_forced_after_a_python_part() -> None:
    hello, bye = TOKENIZER.encode("Hello"), TOKENIZER.encode(" bye")
    found = tokens([*hello, *SUM, *bye, END])
    assert [token.id for token in found] == [*hello, *SUM, *RESULT, *bye]
    assert [token.id for token in found if token.forced] == RESULT


def test_forced_tokens_are_read_in_one_go_with_the_token_before_them() -> None:
    model = Scripted([*SUM, END])
    assert list(generate(model, [BOS], max_tokens=50, stop_ids={END}, tool=PythonTool(TOKENIZER))) == [*SUM, *RESULT]
    assert model.read == [[BOS], *([token] for token in SUM[:-1]), [PYTHON_END, *RESULT]]


@pytest.mark.parametrize("expression", ["60+x", "1/0", "", "print(1)", "'a'.count('b'"])
def test_what_cannot_be_evaluated_forces_nothing(expression: str) -> None:
    script = [PYTHON_START, *TOKENIZER.encode(expression), PYTHON_END, *TOKENIZER.encode("so")]
    assert tokens([*script, END]) == [Token(token, False) for token in script]


def test_only_a_closed_part_is_evaluated_and_a_new_start_begins_anew() -> None:
    one, two = TOKENIZER.encode("1"), TOKENIZER.encode("+2")
    assert not any(token.forced for token in tokens([*one, PYTHON_END, PYTHON_START, *one, *two, END]))
    found = tokens([PYTHON_START, *one, PYTHON_START, *one, *two, PYTHON_END, PYTHON_END, END])
    assert TOKENIZER.decode([token.id for token in found if token.forced]) == "<|output_start|>3<|output_end|>"


def test_the_marks_of_a_result_are_never_sampled() -> None:
    likeliest_next = 0
    for mark in (OUTPUT_START, OUTPUT_END):
        assert tokens([mark, END]) == [Token(likeliest_next, False)]
        assert list(generate(Scripted([mark, END]), [BOS], max_tokens=5, stop_ids={END})) == [mark]


@pytest.mark.parametrize("max_tokens", range(1, len(SUM) + len(RESULT) + 2))
def test_forced_tokens_count_and_nothing_exceeds_the_maximum(max_tokens: int) -> None:
    found = tokens([*SUM, *[5] * 100], max_tokens)
    assert [token.id for token in found] == [*SUM, *RESULT, 5][:max_tokens]


def test_a_stop_id_ends_the_text_even_among_forced_tokens() -> None:
    (nine, *_) = TOKENIZER.encode("93")
    found = tokens([*SUM, *[5] * 100], stop_ids=frozenset({nine}))
    assert [token.id for token in found] == [*SUM, OUTPUT_START]
    # What a result looks like cannot forge a mark: it is encoded as ordinary text.
    specials = set(TOKENIZER.special_tokens.values())
    assert not specials & set(RESULT[1:-1])


class EverySecond(PythonTool):
    """Forces three tokens after every second one."""

    seen = 0

    def follow(self, token: int) -> list[int]:
        self.seen += 1
        return [7, 8, token] if self.seen % 2 == 0 else []


def test_decoding_with_forced_tokens_equals_the_full_forward() -> None:
    model = GPT(CONFIG)
    initialize(model, 3)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.requires_grad_(False).named_parameters():
        if name.endswith(("c_proj.weight", "lm_head.weight")):
            parameter.normal_(0, 0.1, generator=generator)
        elif name == "smear_lambda":
            parameter.fill_(0.5)
    made = list(generate_tokens(model, [1, 2, 3], max_tokens=40, tool=EverySecond(TOKENIZER)))
    assert sum(token.forced for token in made) == 24
    ids = [1, 2, 3]
    for token in made:
        if not token.forced:
            logits = model(torch.tensor([ids]))[0, -1]
            logits[[OUTPUT_START, OUTPUT_END]] = -torch.inf
            assert token.id == int(logits.argmax())
        ids.append(token.id)


def test_pieces_tell_what_the_tool_said_from_text() -> None:
    stream = [*TOKENIZER.encode("Sé "), *SUM, *RESULT, *TOKENIZER.encode(" 🙂")]
    found = list(pieces(TOKENIZER, stream))
    assert "".join(piece.text for piece in found if piece.type == "text") == "Sé  🙂"
    assert [piece for piece in found if piece.type != "text"] == [
        Piece("python", "60+33"),
        Piece("python_output", "93"),
    ]
    assert all("�" not in piece.text for piece in found)
    assert "".join(shown(found)) == "Sé [60+33 = 93] 🙂"


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        ([PYTHON_START, *TOKENIZER.encode("1+x"), PYTHON_END, *TOKENIZER.encode("so")], "[1+x]so"),
        ([PYTHON_START, *TOKENIZER.encode("1+x")], "[1+x]"),
        ([*SUM, *SUM, *RESULT], "[60+33][60+33 = 93]"),
        ([*SUM, *RESULT, *SUM, *RESULT], "[60+33 = 93][60+33 = 93]"),
        ([*SUM, *RESULT[:1]], "[60+33 = ]"),
        (RESULT, "[ = 93]"),
        ([PYTHON_END, *TOKENIZER.encode("so")], "<|python_end|>so"),
        ([], ""),
    ],
)
def test_unusual_parts_are_shown_too(stream: list[int], text: str) -> None:
    assert "".join(shown(pieces(TOKENIZER, stream))) == text


def test_text_is_shown_before_the_answer_ends() -> None:
    taken: list[int] = []

    def watched() -> Iterator[int]:
        for token in [*TOKENIZER.encode("Hi"), *SUM, *RESULT]:
            taken.append(token)
            yield token

    stream = shown(pieces(TOKENIZER, watched()))
    assert "Hi".startswith(next(stream))
    assert len(taken) == 1


def test_a_message_made_of_pieces_renders_to_the_tokens_it_came_from() -> None:
    stream = [*TOKENIZER.encode("So: "), *SUM, *RESULT, *TOKENIZER.encode(" is it.")]
    question = {"role": "user", "content": "60+33?"}
    said = content(pieces(TOKENIZER, stream))
    assert [part["type"] for part in said] == ["text", "python", "python_output", "text"]
    ids, mask = render({"messages": [question, {"role": "assistant", "content": said}]}, TOKENIZER)
    prompt = render_for_completion({"messages": [question, {"role": "assistant", "content": ""}]}, TOKENIZER)
    assert ids == [*prompt, *stream, END]
    assert sum(mask) == len(stream) - len(RESULT) + 1
    assert content([]) == ""
    assert content(pieces(TOKENIZER, TOKENIZER.encode("only text"))) == "only text"


def test_a_chat_shows_results_and_a_base_model_uses_no_tool() -> None:
    script = [*SUM, *TOKENIZER.encode(" it is."), END]
    made = session(script).generate("60+33?")
    assert made.text == "[60+33 = 93] it is."
    assert made.content == [
        {"type": "python", "text": "60+33"},
        {"type": "python_output", "text": "93"},
        {"type": "text", "text": " it is."},
    ]
    assert made.ids[-len(script) - len(RESULT) + 1 :] == [*SUM, *RESULT, *script[len(SUM) : -1]]
    assert session(script).chat("60+33?", temperature=0) == made.text
    assert session(script).chat("60+33?", temperature=0, max_tokens=len(SUM) + 2).startswith("[60+33 = 9")
    plain = session(script, source="base").generate("60+33?")
    assert plain.text == plain.content == TOKENIZER.decode(script[:-1])
