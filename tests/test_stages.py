"""The line as a user walks it: commands on a small real folder, what they print, and how they refuse bad input."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nanochat
from nanochat import checkpoint
from nanochat.cli import main
from nanochat.errors import UserError
from nanochat.records import read
from nanochat.tokenizer.bpe import Tokenizer

#: Whole commands, many of them: left out of the quick check.
pytestmark = pytest.mark.slow

RUN = Path(__file__).parent / "golden" / "run"

#: Bits per byte against the family's.
BPB_TOLERANCE = 1e-6

SMALL = ["--depth", "2", "--aspect-ratio", "32", "--head-dim", "32", "--max-seq-len", "64", "--window-pattern", "L"]
QUICK = [
    *SMALL,
    *["--device-batch-size", "2", "--total-batch-size", "256", "--num-iterations", "4", "--compile", "off"],
    *["--eval-every", "2", "--eval-tokens", "512", "--sample-every", "2", "--sample-prompts", "The"],
]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    return tmp_path


@pytest.fixture
def command(base: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Types a command; returns exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def family(base: Path, command: Command) -> Command:
    """The same, in a base folder into which the family's small run was imported."""
    assert command("import", str(RUN))[0] == 0
    return command


def conversations(folder: Path) -> str:
    path = folder / "talk.jsonl"
    lines = [
        [{"role": "user", "content": f"What did {name} find?"}, {"role": "assistant", "content": "A red kite."}]
        for name in ("Anna", "Emil", "Goro", "Farah", "Lucía") * 6
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def train_and_teach(command: Command, folder: Path) -> None:
    assert command("pretrain", *QUICK)[0] == 0
    code, _, said = command(
        "sft",
        "--model-tag",
        "d2",
        "--conversations",
        conversations(folder),
        "--num-iterations",
        "2",
        "--compile",
        "off",
    )
    assert code == 0, said


def refused(answer: tuple[int, str, str]) -> str:
    """The one sentence of a refusal."""
    code, out, said = answer
    assert code == 2, said
    assert out == ""
    (sentence,) = [line for line in said.splitlines() if line.startswith("nanochat: ")]
    return sentence


def contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def expected_model() -> Any:
    return json.loads((RUN / "expected_model.json").read_text())


def test_an_imported_run_continues_text_like_the_familys_own_program(family: Command) -> None:
    for case in expected_model()["greedy"]:
        added = len(case["result"]) - len(case["prompt_ids"])
        words = ["-p", case["prompt"], "--source", "base", "--temperature", "0", "--max-tokens", str(added)]
        code, out, _ = family("generate", *words, "--seed", "1", "--json")
        assert code == 0
        assert json.loads(out)["ids"] == case["result"]


def test_an_imported_run_has_the_familys_bits_per_byte(family: Command) -> None:
    expected = expected_model()["bpb"]
    code, out, _ = family(
        *["evaluate", "--bpb", "--source", "base", "--json"],
        *["--device-batch-size", str(expected["batch"]), "--max-seq-len", str(expected["seq_len"])],
        *[
            "--buffer-size",
            str(expected["buffer_size"]),
            "--tokenizer-batch-size",
            str(expected["tokenizer_batch_size"]),
        ],
        *["--eval-tokens", str(expected["steps"] * expected["batch"] * expected["seq_len"])],
    )
    assert code == 0
    printed = json.loads(out)
    assert printed["val_bpb"] == pytest.approx(expected["value"], abs=BPB_TOLERANCE)
    assert printed["tokens"] > 0
    assert printed["bytes"] > 0


def test_training_saves_validates_and_samples_and_the_result_can_be_used(family: Command, base: Path) -> None:
    code, out, _ = family("pretrain", *QUICK, "--save-every", "2", "--json")
    assert code == 0
    printed = json.loads(out)
    assert printed["step"] == 4
    assert printed["tokens"] == 4 * 256
    folder = base / "base_checkpoints" / "d2"
    assert checkpoint.steps(folder) == [2, 4, 60]  # beside the imported step
    records = list(read(folder))
    assert records[0]["kind"] == "start"
    assert [r["step"] for r in records if r["kind"] == "validation"] == [0, 2, 4]
    assert [r["step"] for r in records if r["kind"] == "sample"] == [2, 4]
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4]
    assert "step 4/4" in (folder / "log.txt").read_text()
    assert family("generate", "-p", "The", "--step", "4", "--temperature", "0", "--max-tokens", "4")[0] == 0


def test_training_is_the_same_every_time(family: Command) -> None:
    def losses() -> tuple[float, float]:
        _, out, _ = family("pretrain", *QUICK, "--json")
        printed = json.loads(out)
        return printed["smooth_loss"], printed["val_bpb"]

    assert losses() == losses()


def test_an_earlier_run_of_the_tag_is_moved_aside_and_imported_steps_stay(family: Command, base: Path) -> None:
    assert family("pretrain", *QUICK)[0] == 0
    code, _, said = family("pretrain", *QUICK)
    assert code == 0
    assert "moved to" in said
    (aside,) = (base / "base_checkpoints").glob("d2.*")
    assert checkpoint.steps(aside) == [4]
    assert checkpoint.steps(base / "base_checkpoints" / "d2") == [4, 60]


def test_a_chat_model_is_taught_and_answers(family: Command, base: Path) -> None:
    train_and_teach(family, base)
    code, out, _ = family("chat", "-p", "What did Anna find?", "--json", "--max-tokens", "8", "--temperature", "0")
    assert code == 0
    answer = json.loads(out)["text"]
    assert nanochat.load("d2").chat("What did Anna find?", max_tokens=8, temperature=0) == answer
    code, out, _ = family("generate", "-p", "What did Anna find?", "--source", "sft", "--temperature", "0", "--json")
    special = nanochat.load("d2").tokenizer.special_id
    assert json.loads(out)["ids"][:2] == [special("<|bos|>"), special("<|user_start|>")]


def test_teaching_starts_from_the_moments_of_the_base_run(family: Command, base: Path) -> None:
    train_and_teach(family, base)
    parent = checkpoint.load(base / "base_checkpoints" / "d2" / "step_000060", optimizer=True)
    taught = checkpoint.load(base / "chatsft_checkpoints" / "d2" / "step_000002", optimizer=True)
    assert taught.optimizer_step_count == parent.optimizer_step_count + 2
    family("sft", "--model-tag", "d2", "--conversations", conversations(base), "--num-iterations", "2",
           "--compile", "off", "--load-optimizer", "0")  # fmt: skip
    fresh = checkpoint.load(base / "chatsft_checkpoints" / "d2" / "step_000002", optimizer=True)
    assert fresh.optimizer_step_count == 2


def test_without_a_number_of_steps_teaching_is_one_pass_over_the_conversations(family: Command, base: Path) -> None:
    code, out, said = family("sft", "--conversations", conversations(base), "--compile", "off", "--json",
                             "--device-batch-size", "1", "--total-batch-size", "64")  # fmt: skip
    assert code == 0, said
    multipliers = [r["lr_multiplier"] for r in read(base / "chatsft_checkpoints" / "d2", "step")]
    assert json.loads(out)["step"] == len(multipliers) > 1
    assert multipliers[0] == 1.0
    assert all(0 < after <= before for before, after in itertools.pairwise(multipliers))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--total-batch-size", "100"], "100"),
        (["--device-batch-size", "3"], "3"),
        (["--num-kv-heads", "3"], "--num-kv-heads"),
        (["--target-param-data-ratio", "0", "--num-iterations", "-1"], "ratio"),
        (["--data", "nothing"], "nothing"),
        (["--tokenizer", "nothing"], "nothing"),
        (["--eval-tokens", "1"], "--eval-tokens"),
        (["--device", "toaster"], "toaster"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_leave_nothing(
    flags: list[str], named: str, family: Command, base: Path
) -> None:
    before = contents(base)
    assert named in refused(family("pretrain", *QUICK, *flags))
    assert contents(base) == before


def shards(folder: Path, *texts: list[str], column: str = "text") -> str:
    folder.mkdir()
    for number, documents in enumerate(texts):
        pq.write_table(pa.table({column: pa.array(documents, pa.string())}), folder / f"shard_{number:05d}.parquet")
    return str(folder)


def test_data_that_cannot_be_trained_on_is_named(family: Command, tmp_path: Path) -> None:
    empty_folder = tmp_path / "none"
    empty_folder.mkdir()
    assert "none" in refused(family("pretrain", *QUICK, "--data", str(empty_folder)))
    cases = {
        "one shard": shards(tmp_path / "one", ["a"]),
        "no column": shards(tmp_path / "column", ["a"], ["b"], column="body"),
        "no documents": shards(tmp_path / "documents", [], ["b"]),
        "only empty documents": shards(tmp_path / "empty", ["", ""], ["b"]),
    }
    cut = Path(shards(tmp_path / "cut", ["a" * 1000], ["b"]))
    (cut / "shard_00000.parquet").write_bytes((cut / "shard_00000.parquet").read_bytes()[:100])
    nothing = Path(shards(tmp_path / "nothing", ["a"], ["b"]))
    (nothing / "shard_00000.parquet").write_bytes(b"")
    for folder in [*cases.values(), str(cut), str(nothing)]:
        assert folder in refused(family("pretrain", *QUICK, "--data", folder))
    assert not list((tmp_path / "base_checkpoints" / "d2").glob("records*"))


def test_another_tokenizer_in_its_place_is_not_used(family: Command, base: Path) -> None:
    assert family("pretrain", *QUICK)[0] == 0
    other, tokenizer = base / "other", Tokenizer.load(base / "tokenizer")
    # The same tokens, two of them with each other's id: the same size, other ids.
    *tokens, (before, id_before), (last, id_last) = tokenizer.mergeable_ranks.items()
    swapped = dict([*tokens, (before, id_last), (last, id_before)])
    Tokenizer(tokenizer.pattern, swapped, tokenizer.special_tokens).save(other)
    assert "does not belong" in refused(family("generate", "-p", "The", "--tokenizer", str(other)))
    shutil.copy(other / "tokenizer.json", base / "tokenizer" / "tokenizer.json")
    for words in (["generate", "-p", "The"], ["evaluate", "--bpb"], ["sft", "--conversations", conversations(base)]):
        assert "fingerprint" in refused(family(*words))


def test_a_tokenizer_that_is_replaced_is_still_found_by_its_checkpoints(family: Command, base: Path) -> None:
    code, _, said = family("tokenizer", "--vocab-size", "300")
    assert code == 0
    assert "moved" in said
    assert family("generate", "-p", "The", "--max-tokens", "2")[0] == 0


@pytest.mark.parametrize("damage", ["manifest", "missing", "short", "changed"])
def test_a_checkpoint_that_is_cut_short_is_refused(damage: str, family: Command, base: Path) -> None:
    folder = base / "base_checkpoints" / "d2" / "step_000060"
    model = folder / "model.safetensors"
    if damage == "manifest":
        (folder / "manifest.json").unlink()
    elif damage == "missing":
        model.unlink()
    elif damage == "short":
        model.write_bytes(model.read_bytes()[:-100])
    else:
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(bytes(content))
    assert "step_000060" in refused(family("generate", "-p", "The"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-k", "-1"], "top"),
        (["--max-tokens", "0"], "max tokens"),
        (["--max-tokens", "100000"], "room"),
        (["--step", "7"], "60"),
        (["--model-tag", "d9"], "d2"),
    ],
)
def test_generation_that_cannot_be_is_refused(flags: list[str], named: str, family: Command) -> None:
    assert named in refused(family("generate", "-p", "The", *flags))


def test_a_seed_gives_the_same_text_again_and_another_seed_another(family: Command) -> None:
    def ids(seed: int) -> list[int]:
        words = ["--temperature", "1.5", "--top-k", "0", "--max-tokens", "30", "--seed", str(seed), "--json"]
        made: list[int] = json.loads(family("generate", "-p", "The", *words)[1])["ids"]
        return made

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_dtype_trains_evaluates_and_generates(
    dtype: str, family: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", dtype)
    assert family("pretrain", *QUICK)[0] == 0
    code, out, _ = family("evaluate", "--bpb", "--step", "60", "--eval-tokens", "1024", "--json")
    assert code == 0
    assert json.loads(out)["val_bpb"] == pytest.approx(expected_model()["bpb"]["value"], abs=0.05)
    assert family("generate", "-p", "The", "--max-tokens", "3")[0] == 0


def test_an_unknown_dtype_is_refused(family: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", "int3")
    assert "NANOCHAT_DTYPE" in refused(family("generate", "-p", "The"))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[", "line 2"),
        ('[{"role": "user", "content": "Hi"}]', "line 2"),
        ('[{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hi"}]', "line 2"),
        ('{"messages": 3}', "line 2"),
    ],
)
def test_a_malformed_conversation_names_file_and_line(line: str, named: str, family: Command, base: Path) -> None:
    path = Path(conversations(base))
    first, *_ = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n")
    sentence = refused(family("sft", "--conversations", str(path)))
    assert named in sentence
    assert "talk.jsonl" in sentence


def test_a_long_dialogue_drops_its_oldest_turns_and_a_long_message_is_refused(family: Command, base: Path) -> None:
    train_and_teach(family, base)
    session = nanochat.load("d2", source="sft")
    turn = [{"role": "user", "content": "What did Anna find?"}, {"role": "assistant", "content": "A red kite."}]
    kept, dropped = session.fit([*turn * 6, turn[0]], max_tokens=8)
    assert dropped > 0
    assert dropped % 2 == 0
    assert kept[0]["role"] == "user"
    assert kept[-1] == turn[0]
    with pytest.raises(UserError, match="shorten"):
        session.fit([{"role": "user", "content": "word " * 200}], max_tokens=8)


def test_pieces_of_a_stream_never_end_inside_a_character(family: Command, base: Path) -> None:
    from nanochat.inference.session import decode_pieces

    tokenizer = nanochat.load("d2", source="base").tokenizer
    text = "世界 🙂👩‍👩‍👧 café"
    pieces = list(decode_pieces(tokenizer, iter(tokenizer.encode(text))))
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)


def test_every_saved_step_is_measured_on_the_same_rows_of_one_text(family: Command, base: Path) -> None:
    assert family("pretrain", *QUICK, "--model-tag", "curve", "--save-every", "1")[0] == 0
    text = base / "fixed.txt"
    text.write_text("Anna found a red kite. Emil found an old map.\n" * 40, encoding="utf-8")
    words = [
        "evaluate",
        "--bpb",
        "-g",
        "curve",
        "--data",
        str(text),
        "--eval-tokens",
        "256",
        "--device-batch-size",
        "2",
    ]
    code, out, said = family(*words, "--step", "all", "--json")
    assert code == 0, said
    printed = json.loads(out)
    assert [each["step"] for each in printed["steps"]] == [1, 2, 3, 4]
    assert Path(printed["picture"]).read_bytes().startswith(b"\x89PNG")
    # Each figure is what that step alone gives on that text.
    for each in printed["steps"]:
        alone = json.loads(family(*words, "--step", str(each["step"]), "--json")[1])
        assert alone["val_bpb"] == each["val_bpb"]
        assert (alone["tokens"], alone["bytes"]) == (printed["tokens"], printed["bytes"])


def test_a_step_that_is_neither_a_number_nor_all_is_refused(family: Command) -> None:
    assert "sometimes" in refused(family("evaluate", "--bpb", "--step", "sometimes"))


def test_status_and_runs_tell_of_a_finished_run_without_loading_torch(family: Command, base: Path) -> None:
    assert family("pretrain", *QUICK)[0] == 0
    code, out, _ = family("status", "d2")
    assert code == 0
    assert "4 of 4" in out
    assert "finished" in out
    code, out, _ = family("runs", "--json")
    assert code == 0
    assert "d2" in out
    folder = base / "base_checkpoints" / "d2"
    assert (folder / "report.md").is_file()
    assert (folder / "loss.png").is_file()
