import gzip
import json
import os
import random
import sys
import tracemalloc

import pytest

from jaxlab.data import readers
from jaxlab.data.readers import find_source, read_documents, read_json_lines, read_pieces
from jaxlab.data.text import Document
from jaxlab.errors import UserError


def write(folder, **files):
    """Files by their names, in which `__` stands for a dot and `_in_` for a folder."""
    for name, content in files.items():
        path = folder / name.replace("_in_", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def texts(path, **settings):
    return {d.name: d.text.decode() for d in read_documents(path, **settings)}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def skipped(path, **settings):
    """The documents that are left, and what was passed over."""
    seen = []
    left = texts(path, skip_bad=True, on_skip=lambda *place: seen.append(place), **settings)
    return left, seen


def test_a_text_file_is_a_document(tmp_path):
    write(tmp_path, notes__md="Hé\n", packed__txt__gz=gzip.compress(b"one\ntwo"), bare="x")
    assert list(read_documents(tmp_path / "notes.md")) == [Document("notes.md", "Hé\n".encode())]
    assert texts(str(tmp_path / "packed.txt.gz")) == {"packed.txt.gz": "one\ntwo"}
    assert texts(tmp_path / "bare") == {"bare": "x"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL"])
def test_a_line_of_json_is_a_document(tmp_path, name):
    content = lines({"text": "é", "id": 1}, {"text": "b\nb", "meta": {"x": [None, 1.5]}})
    (tmp_path / name).write_text(content)
    assert texts(tmp_path / name) == {f"{name}/1": "é", f"{name}/2": "b\nb"}
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(content.encode()[:9]) + gzip.compress(content.encode()[9:]))
    assert texts(packed) == {f"{name}.gz/1": "é", f"{name}.gz/2": "b\nb"}


def test_the_field_is_chosen(tmp_path):
    write(tmp_path, a__jsonl=lines({"body": "x", "text": 1}))
    assert texts(tmp_path / "a.jsonl", field="body") == {"a.jsonl/1": "x"}


def test_json_escapes(tmp_path):
    write(tmp_path, a__jsonl='{"text": "\\u00e9\\ud83d\\ude00\\t\\"\\/"}\n{"t\\u0065xt": "b"}')
    assert texts(tmp_path / "a.jsonl") == {"a.jsonl/1": 'é\U0001f600\t"/', "a.jsonl/2": "b"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path, end, mark):
    records = ['{"text": "a\\r\\nb\\rc"}', "", "  ", '{"text":', '{"text": "d"}']
    write(tmp_path, a__txt=mark + end.join(["a", "", "b", ""]), a__jsonl=mark + end.join(records))
    assert texts(tmp_path / "a.txt") == {"a.txt": "a\n\nb\n"}
    left, bad = skipped(tmp_path / "a.jsonl")
    assert left == {"a.jsonl/1": "a\nb\nc", "a.jsonl/5": "d"}
    assert [place for place, _ in bad] == ["a.jsonl line 4"]


def test_mixed_line_ends(tmp_path):
    one = '{"text": "x"}'
    write(tmp_path, a__txt="a\r\n\r\r\nb\n\rc\r", a__jsonl=f"{one}\r\n{one}\r{one}\n\r{one}\r\r\n")
    assert texts(tmp_path / "a.txt") == {"a.txt": "a\n\n\nb\n\nc\n"}
    assert list(texts(tmp_path / "a.jsonl")) == ["a.jsonl/1", "a.jsonl/2", "a.jsonl/3", "a.jsonl/5"]


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_the_size_of_blocks_does_not_show(tmp_path, monkeypatch, block):
    chance = random.Random(block)
    text = "".join(chance.choice("ab é\U0001f600\n\r") for _ in range(300)) + "\r"
    records = chance.choice(["\r", "\n", "\r\n"]).join(lines({"text": text}).strip() for _ in "12")
    write(
        tmp_path, a__txt="\ufeff" + text, b__jsonl=records, c__txt__gz=gzip.compress(text.encode())
    )
    whole = texts(tmp_path)
    clean = text.replace("\r\n", "\n").replace("\r", "\n")
    assert list(whole.values()) == [clean] * 4
    monkeypatch.setattr(readers, "_BLOCK", max(block, 3))
    monkeypatch.setattr(readers, "_PIECE", block + 1)
    assert texts(tmp_path) == whole
    pieces = list(read_pieces(find_source(tmp_path)))
    assert max(len(piece.text) for piece in pieces) <= block + 1
    assert sum(piece.first for piece in pieces) == 4


def test_the_line_of_a_mistake_is_right_wherever_blocks_end(tmp_path, monkeypatch):
    write(tmp_path, a__txt=b"a\r\n\r\nb\r\xe9", b__jsonl=b'{"text":"a"}\r\n\r\n{"text"\r\n')
    write(tmp_path, c__txt="é\n\r\n\0")
    for block in (1, 2, 3, 5, 100):
        monkeypatch.setattr(readers, "_BLOCK", block)
        for name, line in (("a.txt", 4), ("b.jsonl", 3), ("c.txt", 3)):
            with pytest.raises(UserError) as caught:
                list(read_documents(tmp_path / name))
            assert caught.value.value == f"{name} line {line}"


def test_white_space_is_no_document(tmp_path):
    write(tmp_path, a__txt=" \n\t\r\n", b__txt="", c__txt=" x", d__jsonl=lines({"text": " \n"}))
    assert texts(tmp_path) == {"c.txt": " x"}


def test_long_white_space_is_none_either(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_PIECE", 4)
    write(tmp_path, a__txt="\n" * 50, b__txt="\n" * 50 + "x")
    assert texts(tmp_path) == {"b.txt": "\n" * 50 + "x"}


@pytest.fixture
def shelf(tmp_path):
    write(
        tmp_path,
        b__txt="b",
        a_in_z__txt="z",
        a_in_c__md="c",
        a_in_deep_in_d__txt="d",
        B__jsonl=lines({"text": "B"}),
        __hidden__txt="no",
        __git_in_config="no",
        a_in___hidden="no",
    )
    (tmp_path / "é.txt").write_text("e")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/*", ["B.jsonl/1", "a/c.md", "a/deep/d.txt", "a/z.txt", "b.txt", "é.txt"]),
        ("**", ["B.jsonl/1", "a/c.md", "a/deep/d.txt", "a/z.txt", "b.txt", "é.txt"]),
        ("*", ["B.jsonl/1", "b.txt", "é.txt"]),
        ("**/*.txt", ["a/deep/d.txt", "a/z.txt", "b.txt", "é.txt"]),
        ("a/**/*.txt", ["a/deep/d.txt", "a/z.txt"]),
        ("a/*.txt", ["a/z.txt"]),
        ("a/**", ["a/c.md", "a/deep/d.txt", "a/z.txt"]),
        ("**/deep/**/d.txt", ["a/deep/d.txt"]),
        ("**/**/z.txt", ["a/z.txt"]),
        ("[!a-z].txt", ["é.txt"]),
        ("?/?.*", ["a/c.md", "a/z.txt"]),
    ],
)
def test_a_folder_is_read_by_the_names_that_match(shelf, pattern, names):
    assert list(texts(shelf, pattern=pattern)) == names


def test_what_does_not_match_is_not_looked_at(shelf):
    (shelf / "dangling").symlink_to("nowhere")
    (shelf / "loop").symlink_to(".")
    os.mkfifo(shelf / "pipe")
    assert list(texts(shelf, pattern="*.txt")) == ["b.txt", "é.txt"]
    assert list(texts(shelf, pattern="a/**/*.md")) == ["a/c.md"]


def test_links_are_followed_but_not_in_circles(shelf):
    (shelf / "link.txt").symlink_to("a/z.txt")
    (shelf / "linked").symlink_to("a/deep", target_is_directory=True)
    assert texts(shelf)["link.txt"] == "z"
    assert texts(shelf)["linked/d.txt"] == "d"
    (shelf / "a" / "deep" / "back").symlink_to("..", target_is_directory=True)
    left, bad = skipped(shelf)
    assert {name for name in left if name.startswith("linked")} == {
        "linked/d.txt",
        "linked/back/c.md",
        "linked/back/z.txt",
    }
    assert {place for place, _ in bad} == {"a/deep/back", "linked/back/deep"}


def test_a_hidden_path_that_is_given_is_read(shelf, monkeypatch):
    assert texts(shelf / ".hidden.txt") == {".hidden.txt": "no"}
    monkeypatch.chdir(shelf / "a")
    assert list(texts(".")) == ["c.md", "deep/d.txt", "z.txt"]
    monkeypatch.setenv("HOME", str(shelf))
    assert texts("~/b.txt") == {"b.txt": "b"}


def test_bad_lines_and_files_are_passed_over_and_counted(tmp_path):
    good = json.dumps({"text": "good"})
    write(
        tmp_path,
        a__jsonl=f"{good}\n[]\n{good}\n{{'text'\n{json.dumps({'text': None})}\n{good}",
        b__txt=b"fine \xff",
        c__txt="fine",
        d__jsonl__gz=gzip.compress(f"{good}\n".encode() * 5)[:-9],
        e__txt__gz=gzip.compress(b"text" * 100)[:-9],
    )
    (tmp_path / "f.txt").symlink_to("nowhere")
    left, bad = skipped(tmp_path)
    assert list(left) == [
        "a.jsonl/1",
        "a.jsonl/3",
        "a.jsonl/6",
        "c.txt",
        *(f"d.jsonl.gz/{line}" for line in range(1, 6)),
    ]
    assert [place for place, _ in bad] == [
        "f.txt",
        "a.jsonl line 2",
        "a.jsonl line 4",
        "a.jsonl line 5",
        "b.txt line 1",
        "d.jsonl.gz line 6",
        "e.txt.gz",
    ]
    assert texts(tmp_path, skip_bad=True) == left


def test_if_nothing_is_left_the_first_reason_is_told(tmp_path):
    write(tmp_path, a__jsonl="[]\n3\n")
    with pytest.raises(
        UserError, match=r"holds no text; .*; 2 bad .* first: a\.jsonl line 1: holds an"
    ):
        texts(tmp_path / "a.jsonl", skip_bad=True)


def test_mistakes_in_the_call_come_at_once(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_documents(tmp_path / "none")


def test_reading_is_lazy(tmp_path):
    write(tmp_path, a__jsonl=lines({"text": "x"}) * 20000 + "broken")
    documents = read_documents(tmp_path / "a.jsonl")
    assert [next(documents).name for _ in range(2)] == ["a.jsonl/1", "a.jsonl/2"]
    with pytest.raises(UserError, match="line 20001"):
        list(documents)


def test_a_line_of_50_mb_is_one_document(tmp_path):
    size = 50_000_000
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(b'{"text": "' + b"word " * (size // 5) + b'"}')
    write(tmp_path, b__txt="word " * (size // 5))
    tracemalloc.start()
    try:
        for name, most in (("a.jsonl", 5.5), ("b.txt", 2.5)):
            tracemalloc.reset_peak()
            assert [len(document.text) for document in read_documents(tmp_path / name)] == [size]
            assert tracemalloc.get_traced_memory()[1] < most * size
        tracemalloc.reset_peak()
        assert (
            sum(len(piece.text) for piece in read_pieces(find_source(tmp_path / "b.txt"))) == size
        )
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_line_without_end_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_LONGEST_LINE", 1_000_000)
    long = json.dumps({"text": "x" * 1_000_000})
    good = json.dumps({"text": "y" * 900_000})
    packed = gzip.compress(f"{good}\n{long}\n{good}\n{'[' * 20_000_000}".encode(), 1)
    write(tmp_path, a__jsonl__gz=packed)
    tracemalloc.start()
    try:
        left, bad = skipped(tmp_path / "a.jsonl.gz")
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()
    assert list(left) == ["a.jsonl.gz/1", "a.jsonl.gz/3"]
    assert bad == [
        (f"a.jsonl.gz line {line}", "is longer than 1000000 bytes; allowed: shorter lines")
        for line in (2, 4)
    ]


def test_garbage_is_refused_in_one_line(tmp_path):
    chance, refusals = random.Random(0), []
    good = lines({"text": "some text é", "n": [1, {"a": None}]}, {"text": "more"}).encode()
    for name in ("a.jsonl", "a.txt", "a.jsonl.gz", "a.txt.gz"):
        whole = gzip.compress(good) if name.endswith("gz") else good
        for _ in range(150):
            content = bytearray(whole)
            for _ in range(chance.choice([1, 1, 4])):
                content[chance.randrange(len(content))] = chance.randrange(256)
            (tmp_path / name).write_bytes(content[: chance.choice([len(content), 30])])
            try:
                found = texts(tmp_path / name)
            except UserError as error:
                refusals.append(str(error))
            else:
                assert all(text.strip() and "\0" not in text for text in found.values())
    assert len(refusals) > 300
    assert all(refusal.isprintable() for refusal in refusals)


def test_json_lines_with_their_places(tmp_path):
    write(tmp_path, a__jsonl='{"a": 1}\n\n{"b": {}}\nnull\n', b__jsonl="")
    with pytest.raises(UserError, match=r"data\.path=a\.jsonl line 4: holds null; allowed"):
        list(read_json_lines(tmp_path / "a.jsonl"))
    bad = []
    found = read_json_lines(
        tmp_path / "a.jsonl", skip_bad=True, on_skip=lambda *place: bad.append(place)
    )
    assert list(found) == [("a.jsonl line 1", {"a": 1}), ("a.jsonl line 3", {"b": {}})]
    assert [place for place, _ in bad] == ["a.jsonl line 4"]
    assert list(read_json_lines(tmp_path / "b.jsonl")) == []
    with pytest.raises(UserError, match="is a folder; allowed: a file"):
        read_json_lines(tmp_path)


def test_json_lines_pass_over_the_rest_of_a_damaged_file(tmp_path):
    write(tmp_path, a__jsonl__gz=gzip.compress(b'{"a": 1}\n')[:-4])
    with pytest.raises(UserError, match="line 2: is cut off"):
        list(read_json_lines(tmp_path / "a.jsonl.gz"))
    assert len(list(read_json_lines(tmp_path / "a.jsonl.gz", skip_bad=True))) == 1


@pytest.fixture
def arrow():
    pytest.importorskip("pyarrow.parquet")
    return pytest.importorskip("pyarrow")


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "string_view"])
def test_a_row_of_a_table_is_a_document(tmp_path, arrow, kind):
    column = arrow.array(["é\r\n", "", "b", "é\r\n"])
    if kind == "dictionary":
        column = column.dictionary_encode()
    elif kind != "string":
        column = column.cast(getattr(arrow, kind)())
    table = arrow.table({"id": [1, 2, 3, 4], "body": column})
    arrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found = texts(tmp_path, field="body")
    assert found == {"a.parquet/1": "é\n", "a.parquet/3": "b", "a.parquet/4": "é\n"}


def test_rows_keep_their_numbers_over_batches(tmp_path, arrow):
    table = arrow.table({"text": [f"row {number}" for number in range(1, 1001)]})
    arrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    found = texts(tmp_path / "a.parquet")
    assert len(found) == 1000
    assert all(text == f"row {name.partition('/')[2]}" for name, text in found.items())


def test_bad_rows_are_passed_over(tmp_path, arrow):
    bad = arrow.array([b"a", None, b"\xff", b"n\0l", b"b"], arrow.binary()).view(arrow.string())
    arrow.parquet.write_table(arrow.table({"text": bad}), tmp_path / "a.parquet")
    left, places = skipped(tmp_path / "a.parquet")
    assert list(left.values()) == ["a", "b"]
    assert [place for place, _ in places] == [f"a.parquet row {row}" for row in (2, 3, 4)]
    with pytest.raises(UserError, match=r"a\.parquet row 2: column 'text' holds null"):
        texts(tmp_path / "a.parquet")


def test_damaged_tables_are_refused_in_one_line(tmp_path, arrow):
    table = arrow.table({"text": [f"document {number} " * 9 for number in range(400)]})
    path = tmp_path / "a.parquet"
    arrow.parquet.write_table(table, path, row_group_size=100, write_page_checksum=True)
    whole, refusals = path.read_bytes(), []
    chance = random.Random(0)
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 5])):
            content[chance.randrange(len(content))] ^= chance.randrange(1, 256)
        path.write_bytes(content[: chance.choice([len(content), chance.randrange(len(content))])])
        try:
            texts(path)
        except UserError as error:
            refusals.append(str(error))
    assert len(refusals) > 75
    assert all(refusal.isprintable() for refusal in refusals)


def test_without_pyarrow_it_is_named(tmp_path, monkeypatch):
    write(tmp_path, a__parquet="PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'jaxlab\[parquet\]'"):
        texts(tmp_path, skip_bad=True)
