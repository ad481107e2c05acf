"""Own files become data sets; what is wrong in them is said with file and line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from golden_text import golden_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat.data.amounts import count_tokens
from nanochat.data.own_text import import_text, open_as_validation
from nanochat.data.sources import iterate_texts, open_data_set
from nanochat.data.text_files import PLAIN, Reading, Tally, find_files, read_documents
from nanochat.errors import UserError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, reading: Reading = PLAIN) -> list[str]:
    return list(read_documents(find_files([path]), reading, Tally()))


def parquet(path: Path, texts: list, column: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({column: texts}), path, row_group_size=3)
    return path


def jsonl(path: Path, values: list) -> Path:
    return write(path, "".join(json.dumps(value) + "\n" for value in values))


def imported(paths: list[Path], base: Path, **settings) -> tuple[list[str], list[str]]:
    """Training and validation documents of what is imported."""
    import_text(paths, base / "data" / "own", name="own", **settings)
    data_set = open_data_set(base / "data" / "own")
    return list(iterate_texts(data_set, "train")), list(iterate_texts(data_set, "val"))


def test_a_folder_of_every_kind_of_file_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.txt", "first\r\nfile")
    write(tmp_path / "a" / "2.md", "\ufeff# second")
    jsonl(tmp_path / "b.jsonl", [{"text": "third", "more": 1}, {"text": "f\u2028urth"}])
    parquet(tmp_path / "c.parquet", ["fifth", "sixth"])
    write(tmp_path / ".hidden" / "no.txt", "no")
    write(tmp_path / "picture.png", b"\x89PNG")
    assert read(tmp_path) == ["first\nfile", "# second", "third", "f\u2028urth", "fifth", "sixth"]


def test_plain_files_are_split_where_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\ntwo\n\n \nthree\n---\nfour\n---\n")
    assert read(path) == ["one\ntwo\n\n \nthree\n---\nfour\n---\n"]
    assert read(path, Reading(split_on="blank-line")) == ["one\ntwo", "three\n---\nfour\n---"]
    assert read(path, Reading(split_on="---")) == ["one\ntwo\n\n \nthree", "four"]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    tally = Tally()
    paths = [jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": " \n"}, {"text": "x"}]), write(tmp_path / "b.txt", "")]
    paths.append(parquet(tmp_path / "c.parquet", [None, "y"]))
    assert list(read_documents(paths, PLAIN, tally)) == ["x", "y"]
    assert tally.empty == 4
    assert tally.file_bytes == sum(path.stat().st_size for path in paths)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab \n", min_size=1, max_size=400), longest=st.integers(1, 60))
def test_long_documents_are_cut_and_nothing_of_them_is_lost(tmp_path: Path, text: str, longest: int) -> None:
    tally, reading = Tally(), Reading(longest=longest)
    pieces = list(read_documents([write(tmp_path / "a.txt", text)], reading, tally))
    assert all(0 < len(piece) <= longest for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert tally.cut == (len(text) > longest)
    assert pieces == list(read_documents([jsonl(tmp_path / "a.jsonl", [{"text": text}])], reading, Tally()))


def test_every_document_is_on_one_side_and_the_split_is_stable(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(200)]
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    train, val = imported([path], tmp_path, val_share=0.1)
    assert sorted(train + val) == sorted(texts)
    assert 5 <= len(val) <= 40
    more = jsonl(tmp_path / "b.jsonl", [{"text": f"another {i}"} for i in range(100)])
    _, larger_val = imported([more, path], tmp_path / "larger", val_share=0.1)
    assert set(val) <= set(larger_val), "what validated before still does"


@pytest.mark.parametrize("number", [2, 3, 10])
def test_a_few_documents_are_enough(number: int, tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(number)]
    train, val = imported([jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])], tmp_path)
    assert len(val) >= 1
    assert sorted(train + val) == sorted(texts)


def test_one_parquet_file_is_split_by_document(tmp_path: Path) -> None:
    train, val = imported([parquet(tmp_path / "one.parquet", [f"document {i}" for i in range(50)])], tmp_path)
    assert len(train) + len(val) == 50
    assert val


def test_one_long_file_gives_a_validation_part(tmp_path: Path) -> None:
    text = "\n\n".join(f"paragraph {i} of a book" for i in range(3000))
    train, val = imported([write(tmp_path / "book.txt", text)], tmp_path, reading=Reading(longest=5000))
    assert len(train) > 5
    assert "".join(sorted(train + val)) == "".join(sorted(read(tmp_path / "book.txt", Reading(longest=5000))))
    assert all(document.startswith("paragraph") for document in train + val)


def test_too_little_text_is_said_exactly(tmp_path: Path) -> None:
    one = write(tmp_path / "one.txt", "all of it")
    with pytest.raises(UserError, match=r"the text is one document, and at least two are needed.*--split-on"):
        imported([one], tmp_path)
    with pytest.raises(UserError, match="would have no documents: all that was read is empty"):
        imported([write(tmp_path / "blank.txt", " \n")], tmp_path)
    two = [write(tmp_path / f"{i}.txt", f"number {i}") for i in (0, 5)]
    with pytest.raises(
        UserError, match=r"all 2 documents fall into the validation part: lower --val-share \(now 0\.5\)"
    ):
        imported(two, tmp_path, val_share=0.5)
    for share in (0, -1, 0.6, float("nan")):
        with pytest.raises(UserError, match="--val-share"):
            imported(two, tmp_path, val_share=share)
    assert not list((tmp_path / "data").glob("*")), "nothing is left behind"


def test_repeated_documents_are_counted_and_on_one_side(tmp_path: Path) -> None:
    texts = [f"document {i % 20}" for i in range(60)]
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    _, tally = import_text([path], tmp_path / "own", name="own", val_share=0.3)
    data_set = open_data_set(tmp_path / "own")
    assert tally.repeated == 40
    assert not set(iterate_texts(data_set, "train")) & set(iterate_texts(data_set, "val"))


def test_tokens_are_counted_with_a_tokenizer(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(20)])
    manifest, _ = import_text([path], tmp_path / "own", name="own", tokenizer=golden_tokenizer())
    data_set = open_data_set(tmp_path / "own")
    assert data_set.manifest == manifest
    for split in ("train", "val"):
        counted = count_tokens(data_set, split, golden_tokenizer(), 10**9)
        assert manifest.tokens[golden_tokenizer().fingerprint][split] == counted


FAULTS = {
    "latin-1": ("a.txt", "line one\nline two\ncaf\xe9\n".encode("latin-1"), r"a\.txt, line 3 is not UTF-8"),
    "latin-1 at once": ("a.txt", b"\xe9", r"a\.txt, line 1 is not UTF-8"),
    "cut at the end": ("a.txt", "x\né".encode()[:-1], r"a\.txt, line 2 is not UTF-8"),
    "UTF-16": ("a.txt", "text".encode("utf-16-le"), r"a\.txt, line 1 holds a NUL byte"),
    "bad JSON": ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', r"a\.jsonl, line 3 is not JSON"),
    "JSON not UTF-8": ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', r"a\.jsonl, line 2 is not UTF-8 \(byte 11\)"),
    "no object": ("a.jsonl", b'"x"\n', r'a\.jsonl, line 1 is not an object: write \{"text"'),
    "no text": ("a.jsonl", b'{"content": "x"}\n', r"line 1 has no 'text' \(it has content\): .*--column"),
    "text is a number": ("a.jsonl", b'{"text": 5}\n', r"line 1 has a 'text' that is no string"),
    "a conversation": ("a.jsonl", b'{"messages": []}\n', r"line 1 is a conversation, not text: .* dataset check"),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1 holds half a surrogate pair"),
    "deep": ("a.jsonl", b"[" * 100_000, r"line 1 is not JSON"),
    "not parquet": ("a.parquet", b"PAR1 or not", r"a\.parquet is not a readable parquet file"),
    "empty parquet": ("a.parquet", b"", r"a\.parquet is empty"),
    "another kind": ("a.docx", b"x", r"a\.docx is not one of \.txt, \.md, \.jsonl, \.parquet"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_with_file_and_line(fault: str, tmp_path: Path) -> None:
    name, content, message = FAULTS[fault]
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=message):
        imported([path], tmp_path)
    assert not list((tmp_path / "data").glob("*")), "nothing is left behind"


def test_the_line_of_a_bad_byte_is_found_far_into_a_file(tmp_path: Path) -> None:
    lines = ["é" * 1000] * 300
    content = "\n".join(lines).encode() + b"\nnow \xff wrong\n" + "é".encode() * 50_000
    with pytest.raises(UserError, match="line 301 is not UTF-8"):
        read(write(tmp_path / "a.txt", content))
    with pytest.raises(UserError, match="line 1 is not UTF-8"):
        read(write(tmp_path / "a.txt", "é".encode() * 100_000 + b"\xff"))


def test_parquet_columns_are_checked_and_chosen(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["x", "y"], column="content")
    with pytest.raises(UserError, match=r"has no column 'text' \(it has content\)"):
        read(path)
    assert read(path, Reading(column="content")) == ["x", "y"]
    with pytest.raises(UserError, match="holds int64, not strings"):
        read(parquet(tmp_path / "b.parquet", [1, 2]))
    bad = pyarrow.array([b"good", b"bad \xff"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"c\.parquet, row 2 is not UTF-8"):
        read(tmp_path / "c.parquet")


def test_paths_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file or folder"):
        find_files([tmp_path / "absent"])
    with pytest.raises(UserError, match="holds no files of text"):
        find_files([tmp_path])


def test_a_line_that_does_not_fit_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanochat.data.json_lines.LONGEST_LINE", 1000)
    path = jsonl(tmp_path / "a.jsonl", [{"text": "short"}, {"text": "x" * 1000}])
    with pytest.raises(UserError, match=r"a\.jsonl, line 2 is longer than"):
        read(path)


def test_a_whole_file_serves_as_validation_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one document, and all of it")
    (tmp_path / "shards").mkdir()
    data_set = open_as_validation(path, tmp_path / "shards")
    assert list(iterate_texts(data_set, "val")) == ["one document, and all of it"]
    assert data_set.train == ()
    with pytest.raises(UserError, match="holds no text"):
        open_as_validation(write(tmp_path / "b.txt", "\n"), tmp_path / "shards")


#: Memory that importing may take beyond what is loaded before it begins.
MOST_IMPORT_BYTES = 150_000_000


@pytest.mark.slow
def test_a_document_of_200_mb_is_imported_in_bounded_memory(tmp_path: Path) -> None:
    line = "a line of text without any end to it, é\n" * 2_500
    with (tmp_path / "huge.txt").open("w", encoding="utf-8") as file:
        for _ in range(2_000):
            file.write(line)
    assert (tmp_path / "huge.txt").stat().st_size > 200_000_000
    code = (
        "import sys; from pathlib import Path; from nanochat.data.own_text import import_text;"
        " from nanochat.tokenizer.memory import peak_resident_bytes as peak; before = peak();"
        " import_text([Path(sys.argv[1])], Path(sys.argv[2]), name='huge'); print(peak() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "huge.txt"), str(tmp_path / "own")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < MOST_IMPORT_BYTES
    assert sum(map(len, iterate_texts(open_data_set(tmp_path / "own"), "train"))) > 190_000_000


def test_a_disk_that_refuses_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    jsonl(tmp_path / "a.jsonl", [{"text": f"{i} {i * i} {i**3}" * 500} for i in range(2000)])
    code = (
        "import resource, signal, sys; from pathlib import Path; from nanochat.data.own_text import import_text;"
        " from nanochat.errors import UserError;"
        " signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: import_text([Path(sys.argv[1])], Path(sys.argv[2]), name='own')\n"
        "except UserError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.jsonl"), str(tmp_path / "data" / "own")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "the data set cannot be written to" in printed
    assert printed.count("\n") == 1
    assert not list((tmp_path / "data").glob("*"))


def test_a_place_that_is_no_folder_is_one_sentence(tmp_path: Path) -> None:
    write(tmp_path / "data", "a file where a folder should be")
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(5)])
    with pytest.raises(UserError, match="the data set cannot be written to"):
        imported([path], tmp_path)
