"""Whether the memory that a corpus takes to prepare grows with its size.

    python -m tests.data.memory

Writes corpora of 10 MB and 200 MB, prepares each in a process of its own, and compares the peaks
of resident memory; they may differ by 50 MB. Byte-pair encoding is measured on a quarter of that.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import importlib
import json
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator

KINDS = ("txt", "txt.gz", "jsonl", "jsonl.gz", "parquet", "folder")
_MB = 1_000_000


def write_corpus(folder: pathlib.Path, kind: str, size: int) -> pathlib.Path:
    """Writes about `size` bytes of text as one of `KINDS`; the path to read."""
    path = folder / f"{size}.{kind}"
    if kind == "folder":
        path.mkdir()
        for number, text in enumerate(_documents(size)):
            (path / f"{number}.txt").write_text(text)
    elif kind == "parquet":
        _write_parquet(path, size)
    else:
        opened = functools.partial(gzip.open, compresslevel=1) if kind.endswith("gz") else open
        with opened(path, "wt", encoding="utf-8") as file:
            for text in _documents(size):
                file.write(json.dumps({"text": text}) + "\n" if "jsonl" in kind else text)
    return path


def peak(path: pathlib.Path, tokenizer: str = "bytes") -> int:
    """Peak resident bytes of a process that prepares the corpus; `bytes` or a tokenizer.json."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        command = [sys.executable, "-m", "tests.data.memory", "--measure", str(path)]
        done = subprocess.run(
            [*command, "--tokenizer", tokenizer],
            env={**os.environ, "JAXLAB_DATA_CACHE": cache, "PYTHONPATH": _import_path()},
            check=True,
            capture_output=True,
            text=True,
        )
    return int(done.stdout)


def _documents(size: int) -> Iterator[str]:
    """Different texts of lines of words, about 5000 bytes each."""
    chance = random.Random(0)
    words = [f"{chance.randrange(16**4):x}" for _ in range(4000)]
    text = ""
    while size > 0:
        if len(text) < 10_000:
            text = "".join(" ".join(chance.choices(words, k=12)) + ".\n" for _ in range(4000))
        length = chance.randrange(2000, 8000)
        yield text[:length]
        size -= length
        text = text[length:]


def _write_parquet(path: pathlib.Path, size: int) -> None:
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    schema = arrow.schema([("text", arrow.string())])
    # One row group throughout, which is the hardest case.
    with parquet.ParquetWriter(path, schema) as writer:
        texts = list(_documents(size))
        writer.write_table(arrow.table({"text": texts}, schema), row_group_size=len(texts))


def _import_path() -> str:
    return os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))


def _measure(path: str, tokenizer: str) -> int:
    from jaxlab.data.corpora import load_corpus
    from jaxlab.data.tokenizers import BpeTokenizer, ByteTokenizer

    chosen = ByteTokenizer() if tokenizer == "bytes" else BpeTokenizer.load(tokenizer)
    corpus = load_corpus(path, tokenizer=chosen)
    assert len(corpus.train) > 10 * len(corpus.validation) > 0
    try:
        # Not ru_maxrss, in which Linux counts what the parent held when it started this process.
        status = pathlib.Path("/proc/self/status").read_text()
        (kilobytes,) = re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
        return int(kilobytes) * 1024
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _compare(folder: pathlib.Path, kind: str, tokenizer: str, sizes: tuple[int, int]) -> bool:
    peaks = []
    for size in sizes:
        path = write_corpus(folder, kind, size)
        peaks.append(peak(path, tokenizer))
        if path.is_file():
            path.unlink()
    growth = peaks[1] - peaks[0]
    name = "bytes" if tokenizer == "bytes" else "bpe"
    shown = " ".join(
        f"{size / _MB:.0f}:{most / _MB:.0f}" for size, most in zip(sizes, peaks, strict=True)
    )
    print(f"{kind:9} {name:6} size:peak in MB {shown}, growth {growth / _MB:+.0f}", flush=True)
    return growth <= 50 * _MB


def main() -> int:
    """Measures all kinds; the exit code is 1 if one of them grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", default="bytes", help=argparse.SUPPRESS)
    parser.add_argument("--small", type=int, default=10, help="MB of the small corpora")
    parser.add_argument("--large", type=int, default=200, help="MB of the large ones")
    options = parser.parse_args()
    if options.measure:
        print(_measure(options.measure, options.tokenizer))
        return 0
    sizes = options.small * _MB, options.large * _MB
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        fine = [_compare(folder, kind, "bytes", sizes) for kind in KINDS]

        from jaxlab.data.readers import read_documents
        from jaxlab.data.tokenizers import BpeTokenizer

        sample = write_corpus(folder, "jsonl", 2 * _MB)
        BpeTokenizer.train(read_documents(sample), 2000).save(folder / "tokenizer.json")
        fewer = sizes[0] // 4, sizes[1] // 4
        for kind in ("txt", "jsonl"):
            fine.append(_compare(folder, kind, str(folder / "tokenizer.json"), fewer))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
