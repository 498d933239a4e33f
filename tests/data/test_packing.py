import functools
import itertools
import json
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.data import packing
from jaxlab.data.batches import EpochOrder
from jaxlab.data.packing import PackedBatches, PackedRows, pack_documents
from jaxlab.errors import StorageError, UserError
from jaxlab.models.decoder import Decoder
from jaxlab.ops.attention import causal_mask, segment_mask

SEPARATOR = 0
NAMES = ("tokens", "segment_ids", "positions")


def numbered(sizes) -> list[np.ndarray]:
    """Documents in which no token occurs twice: 1, 2, ... through all of them."""
    ends = np.cumsum(sizes)
    return [
        np.arange(end - size + 1, end + 1, dtype=np.uint32)
        for size, end in zip(sizes, ends, strict=True)
    ]


def segments(batch) -> list[np.ndarray]:
    """The segments of a batch, after checking that numbers, positions and padding are right."""
    found = []
    for tokens, ids, positions in zip(*(batch[name] for name in NAMES), strict=True):
        count = ids.max()
        sizes = [int((ids == number).sum()) for number in range(1, count + 1)]
        padding = len(ids) - sum(sizes)
        expected_ids = [number + 1 for number, size in enumerate(sizes) for _ in range(size)]
        expected_positions = [place for size in sizes for place in range(size)]
        assert ids.tolist() == expected_ids + [0] * padding
        assert positions.tolist() == expected_positions + [0] * padding
        assert tokens[len(tokens) - padding :].tolist() == [SEPARATOR] * padding
        found += np.split(tokens[: len(tokens) - padding], np.cumsum(sizes)[:-1])
    return found


def check(documents, length, rows: PackedRows) -> None:
    batch = rows.read(np.arange(len(rows)))
    assert all(batch[name].dtype == np.int32 for name in NAMES)
    assert all(batch[name].shape == (len(rows), length) for name in NAMES)
    pieces = {int(piece[0]): piece.tolist() for piece in segments(batch)}
    assert rows.num_tokens == sum(map(len, pieces.values()))
    for document in documents:
        expected = document.tolist() + [SEPARATOR] * (len(document) % length > 0)
        for begin in range(0, len(expected), length):
            # Cut only where a row is full, and only this document's tokens.
            assert pieces.pop(expected[begin]) == expected[begin : begin + length]
    assert not pieces


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 23), min_size=1, max_size=40).filter(any),
    length=st.integers(2, 9),
    chunk_tokens=st.integers(1, 60),
    open_rows=st.integers(0, 4),
)
def test_every_token_appears_once_and_in_order(
    tmp_path_factory, sizes, length, chunk_tokens, open_rows
):
    folder = tmp_path_factory.getbasetemp() / "packed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_CHUNK_TOKENS", chunk_tokens)
        patch.setattr(packing, "_CHUNK_ROWS", 1)
        patch.setattr(packing, "_OPEN_ROWS", open_rows)
        rows = pack_documents(iter(numbered(sizes)), length, separator=SEPARATOR, folder=folder)
    check(numbered(sizes), length, rows)


def test_a_small_example(tmp_path):
    documents = [
        np.array(list(text), np.uint8) for text in (b"abcdefg", b"h", b"", b"ijkl", b"mno")
    ]
    rows = pack_documents(documents, 4, separator=SEPARATOR, folder=tmp_path)
    batch = rows.read(np.arange(len(rows)))
    # What fills a row comes first; "ijkl" leaves no place for a separator.
    texts = [bytes(row).decode() for row in batch["tokens"].astype(np.uint8)]
    assert texts == ["abcd", "efg\0", "ijkl", "mno\0", "h\0\0\0"]
    assert batch["segment_ids"].tolist() == [[1] * 4] * 4 + [[1, 1, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 4 + [[0, 1, 0, 0]]
    assert rows.num_tokens == 18
    assert rows.padding == pytest.approx(2 / 20)


@functools.cache
def realistic() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    sizes = np.maximum(1, random.lognormal(np.log(300), 1.2, 3000).astype(int))
    return [random.integers(1, 256, size).astype(np.uint8) for size in sizes]


@pytest.mark.parametrize("length", [128, 2048])
def test_little_is_padding_for_lengths_as_texts_have_them(tmp_path, length):
    rows = pack_documents(realistic(), length, separator=SEPARATOR, folder=tmp_path)
    total = sum(len(document) + (len(document) % length > 0) for document in realistic())
    assert rows.num_tokens == total
    assert len(rows) * length * (1 - rows.padding) == pytest.approx(total)
    assert rows.padding < 0.002


def test_open_rows_that_wait_for_the_next_chunk_keep_padding_small(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK_TOKENS", 4096)
    monkeypatch.setattr(packing, "_CHUNK_ROWS", 1)
    waiting = pack_documents(realistic(), 512, separator=SEPARATOR, folder=tmp_path / "waiting")
    monkeypatch.setattr(packing, "_OPEN_ROWS", 0)
    alone = pack_documents(realistic(), 512, separator=SEPARATOR, folder=tmp_path / "alone")
    assert waiting.padding < 0.01 < alone.padding


@pytest.mark.parametrize("size", [1000, 4_000_000])
def test_neither_many_documents_nor_a_long_one_take_much_memory(tmp_path, monkeypatch, size):
    monkeypatch.setattr(packing, "_CHUNK_TOKENS", 2**14)
    monkeypatch.setattr(packing, "_OPEN_ROWS", 8)
    document = np.broadcast_to(np.uint8(1), size)
    tracemalloc.start()
    try:
        rows = pack_documents(
            itertools.repeat(document, 4_000_000 // size), 256, separator=SEPARATOR, folder=tmp_path
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows.num_tokens == 4_000_000 + (4000 if size == 1000 else 0)
    assert peak < 2_000_000


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_documents_give_the_same_files(tmp_path):
    first = pack_documents(realistic(), 512, separator=SEPARATOR, folder=tmp_path / "first")
    folder = tmp_path / "second"
    replaced = pack_documents(numbered([5, 9]), 4, separator=SEPARATOR, folder=folder)
    second = pack_documents(iter(realistic()), 512, separator=SEPARATOR, folder=folder)
    assert files(tmp_path / "first") == files(folder)
    check(numbered([5, 9]), 4, replaced)  # who holds the old rows keeps them
    assert first.digest == second.digest
    changed = [*realistic()[:-1], realistic()[-1] ^ 1]
    third = pack_documents(changed, 512, separator=SEPARATOR, folder=tmp_path / "third")
    assert third.digest != first.digest
    # Beside the tokens themselves the rows take one bit a token.
    used = sum(map(len, files(folder).values()))
    assert used < len(first) * 512 * 1.14 + 300


@pytest.mark.parametrize("token_type", ["u1", "u2", "u4"])
def test_rows_can_be_loaded_again_and_sent_to_another_process(tmp_path, token_type):
    documents = [document.astype(token_type) for document in numbered([9, 3, 4, 30, 1])]
    rows = pack_documents(documents, 6, separator=SEPARATOR, folder=str(tmp_path))
    assert rows.tokens.dtype == token_type
    assert not rows.tokens.flags.writeable
    for other in (PackedRows.load(str(tmp_path)), pickle.loads(pickle.dumps(rows))):
        assert isinstance(other.tokens.base, np.memmap)
        assert (other.num_tokens, other.digest, len(other)) == (
            rows.num_tokens,
            rows.digest,
            len(rows),
        )
        check(documents, 6, other)


def test_incomplete_rows_do_not_count(tmp_path):
    def broken():
        yield from numbered([9, 3])
        raise RuntimeError("no more")

    with pytest.raises(UserError, match=r"holds no complete packed rows .*rows.json"):
        PackedRows.load(tmp_path)
    pack_documents(numbered([9, 3]), 6, separator=SEPARATOR, folder=tmp_path)
    with pytest.raises(RuntimeError, match="no more"):
        pack_documents(broken(), 6, separator=SEPARATOR, folder=tmp_path)
    with pytest.raises(UserError, match="holds no complete packed rows"):
        PackedRows.load(tmp_path)


@pytest.mark.parametrize("name", ["tokens.bin", "bounds.bin", "rows.json"])
def test_damaged_rows_are_refused(tmp_path, name):
    pack_documents(numbered([9, 3]), 6, separator=SEPARATOR, folder=tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1])
    with pytest.raises(UserError, match="pack the documents again") as caught:
        PackedRows.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_summary_of_another_kind_is_refused(tmp_path):
    pack_documents(numbered([9, 3]), 6, separator=SEPARATOR, folder=tmp_path)
    summary = json.loads((tmp_path / "rows.json").read_text())
    for changes in ({"length": "6"}, {"token_type": "no"}, {"rows": None}):
        (tmp_path / "rows.json").write_text(json.dumps({**summary, **changes}))
        with pytest.raises(UserError, match="holds no complete packed rows"):
            PackedRows.load(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file"):
        pack_documents(numbered([3]), 6, separator=SEPARATOR, folder=tmp_path / "file")


def test_misuse_is_refused(tmp_path):
    pack = functools.partial(pack_documents, separator=SEPARATOR, folder=tmp_path)
    with pytest.raises(ValueError, match="length=1"):
        pack(numbered([3]), 1)
    with pytest.raises(UserError, match="data=0 tokens"):
        pack(numbered([0, 0]), 4)
    with pytest.raises(TypeError, match="float64"):
        pack([np.ones(3)], 4)
    with pytest.raises(TypeError, match="uint8, one before it uint32"):
        pack([*numbered([3]), np.ones(3, np.uint8)], 4)
    with pytest.raises(ValueError, match="one row"):
        pack([np.ones((2, 2), int)], 4)
    with pytest.raises(ValueError, match="separator=256"):
        pack_documents([np.ones(3, np.uint8)], 4, separator=256, folder=tmp_path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> PackedRows:
    sizes = np.random.default_rng(1).integers(1, 20, 60)
    folder = tmp_path_factory.mktemp("rows")
    return pack_documents(numbered(sizes), 12, separator=SEPARATOR, folder=folder)


def test_batches_visit_rows_in_the_epochs_orders(rows):
    batches = PackedBatches(rows, batch_size=4, seed=3)
    order = EpochOrder(len(rows), batch_size=4, seed=3)
    assert batches.steps_per_epoch == len(rows) // 4 > 3
    for step in (0, 40, 7, 3, 10**9):
        expected = rows.read(order.rows(step))
        assert batches[step].keys() == expected.keys() == set(NAMES)
        for name in NAMES:
            np.testing.assert_array_equal(batches[step][name], expected[name])


def test_grain_and_threads_read_the_same_batches(rows):
    batches = PackedBatches(rows, batch_size=4, seed=3)
    steps = [int(step) for step in np.random.default_rng(0).integers(0, 60, size=200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(batches.__getitem__, steps))
    alone = PackedBatches(rows, batch_size=4, seed=3)
    for step, batch in zip(steps, found, strict=True):
        for name in NAMES:
            np.testing.assert_array_equal(batch[name], alone[step][name])
    iterator = iter(batches.dataset().to_iter_dataset())
    iterator.set_state({"next_index": 40})
    np.testing.assert_array_equal(next(iterator)["tokens"], alone[40]["tokens"])


def test_batches_need_enough_rows(rows):
    count = len(rows)
    assert PackedBatches(rows, batch_size=count, seed=0).steps_per_epoch == 1
    with pytest.raises(UserError, match=f"data={count} packed rows of 12 tokens: too few"):
        PackedBatches(rows, batch_size=count + 1, seed=0)
    with pytest.raises(ValueError, match="seed=-1"):
        PackedBatches(rows, batch_size=1, seed=-1)


def test_packed_documents_get_the_logits_that_each_gets_alone(tmp_path):
    random = np.random.default_rng(2)
    documents = [random.integers(1, 11, size).astype(np.uint8) for size in (7, 5, 9, 3, 2, 11)]
    rows = pack_documents(documents, 16, separator=SEPARATOR, folder=tmp_path)
    batch = rows.read(np.arange(len(rows)))
    assert batch["segment_ids"].max() > 1
    model = Decoder(vocab_size=11, width=12, num_layers=2, num_heads=2, hidden_width=16)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), batch["tokens"]))["params"]
    params = jax.tree.map(lambda x: random.normal(0.3, 0.5, x.shape).astype(np.float32), params)

    @jax.jit
    def forward(tokens, positions, mask):
        logits = model.apply({"params": params}, tokens, positions, mask)
        assert isinstance(logits, jax.Array)
        return logits

    mask = segment_mask(*(jnp.asarray(batch[name]) for name in NAMES[1:]))
    packed = forward(batch["tokens"], batch["positions"], mask)
    assert np.isfinite(packed).all()
    places = np.tile(np.arange(16, dtype=np.int32), (len(rows), 1))
    unmasked = forward(batch["tokens"], places, causal_mask(jnp.asarray(places)))
    differences = []
    for row, number in np.ndindex(len(rows), batch["segment_ids"].max()):
        here = batch["segment_ids"][row] == number + 1
        # Tokens behind a document do not reach its logits, so all have one shape.
        tokens = np.zeros_like(batch["tokens"])
        tokens[:, : here.sum()] = batch["tokens"][row, here]
        alone = forward(tokens, places, causal_mask(jnp.asarray(places)))[0, : here.sum()]
        np.testing.assert_allclose(packed[row, here], alone, atol=1e-5)
        differences.append(np.abs(unmasked[row, here] - alone).max(initial=0.0))
    assert max(differences) > 0.1
