"""Damaged and hostile files, registries, stores and answers of a hub, with the commands that open them."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf

from benchmarks.harness import TARGET

HEADS = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "heads"
DRAFT = TARGET.with_name("draft.gguf")
PROMPT = ("--max-tokens", "4", "--threads", "1", "--ctx", "64", "--temperature", "0")
_EXTREMES = (0, 1, -1, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 0.5, -1e308, float("nan"), float("inf")),
    *("", "x", "\ud800", "\x1b[2J", "../../etc/passwd", "9" * 5000, [], [[]], {}, {"x": 1}, [0] * 9, ["a"], [None]),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a case may put its files, and the models that cases are made from."""

    folder: Path
    mlx: Path

    def run(self, model: Path | str, draft: str = "none", *more: str) -> list[str]:
        return ["run", "def f(x):", "--model", str(model), *PROMPT, "--draft", draft, *(more or ("--no-memory",))]


Make = Callable[[random.Random, Place], list[str]]
"""Writes the files of a case and returns the command that opens them."""


def poke(rng: random.Random, data: bytearray, start: int, end: int) -> None:
    """Change one to four places of `data` between two offsets: a bit, a byte, a number of four or eight bytes."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(start, max(start + 1, end))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 4] = (rng.choice(_EXTREMES) & 0xFFFFFFFF).to_bytes(4, "little")
            case _:
                data[at : at + 8] = (rng.choice(_EXTREMES) & (2**64 - 1)).to_bytes(8, "little")


def damage(rng: random.Random, data: bytes) -> bytearray:
    """Any file with changed bytes, cut, or with more at its end."""
    changed = bytearray(data)
    match rng.randrange(5):
        case 0:
            return changed[: rng.randrange(len(changed))]
        case 1:
            return changed + rng.randbytes(rng.choice((1, 64, 4096)))
        case _:
            poke(rng, changed, 0, min(len(changed), rng.choice((64, 4096, len(changed)))))
    return changed


def change_header(region: str, source: Path, name: str, open: Callable[[Place, Path], list[str]]) -> Make:
    def make(rng: random.Random, place: Place) -> list[str]:
        reader = gguf.GGUFReader(source)
        data = bytearray(source.read_bytes())
        infos = [int(part) for tensor in reader.tensors for part in (tensor.field.offset,)]
        starts = {"header": (0, 64), "tensors": (min(infos), reader.data_offset)}
        if region == "metadata":
            field = rng.choice([each for each in reader.fields.values() if each.offset > 0])
            size = sum(part.nbytes for part in field.parts)
            starts["metadata"] = (field.offset, field.offset + min(size, 200))
        elif region == "weights":
            starts["weights"] = (reader.data_offset, len(data))
        poke(rng, data, *starts[region])
        path = place.folder / name
        path.write_bytes(data)
        return open(place, path)

    return make


def rewrite(rng: random.Random, place: Place, change: Callable[[random.Random, dict[str, Any]], None]) -> list[str]:
    """The packaged target with other metadata."""
    reader, path = gguf.GGUFReader(TARGET), place.folder / "model.gguf"
    values = {
        name: (field.contents(), field.types)
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "general.architecture"))
    }
    contents = {name: value for name, (value, _) in values.items()}
    change(rng, contents)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in contents.items():
        kinds = values[name][1] if name in values else [gguf.GGUFValueType.STRING]
        with suppress(Exception):  # a value that has no form in this type
            if isinstance(value, list):
                writer.add_key_value(name, value, kinds[0], sub_type=kinds[-1])
            else:
                writer.add_key_value(name, value, kinds[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    with suppress(Exception):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    return place.run(path)


def change_vocabulary(rng: random.Random, contents: dict[str, Any]) -> None:
    names = [name for name in contents if name.startswith("tokenizer.")]
    name = rng.choice(names)
    value = contents[name]
    if isinstance(value, list):
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(value))
            sample = value[at]
            value[at] = rng.choice(_EXTREMES[:5]) if isinstance(sample, int) else rng.choice(_WORDS)
        if rng.random() < 0.2:
            del value[rng.randrange(len(value)) :]
    elif isinstance(value, str):
        contents[name] = rng.choice((*_WORDS, "llama", "bert", "rwkv", "t5", "none", "qwen2", "gpt-2"))
    else:
        contents[name] = rng.choice(_EXTREMES[:7])


_WORDS = ("", "\x00", "<|im_end|>", "\ud7ff\ue000", "a" * 100_000, " ", "\x1b]0;x\x07", "Ġ", "a b", "ab c")
_TEMPLATES = (
    "{% for a in range(10**9) %}x{% endfor %}", "{{ messages.__class__.__mro__ }}", "{{ 'x' * 10**9 }}",
    "{% include 'x' %}", "{{ raise_exception('no') }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages[0].content", "{{ 1 / 0 }}", "{{ cycler.__init__.__globals__ }}", "{" * 9000,
    "{{ messages | tojson(indent=10**8) }}", "{% set x = namespace() %}{{ x.y.z }}",
    "{{ ''.join(['a' * 65536] * 65536) }}", "{{ messages | map(attribute='content') | list | string * 99999999 }}",
)  # fmt: skip


def change_template(rng: random.Random, contents: dict[str, Any]) -> None:
    source = bytearray(rng.choice(_TEMPLATES).encode())
    if rng.random() < 0.6:
        poke(rng, source, 0, len(source))
    contents["tokenizer.chat_template"] = source.decode("utf-8", "replace")


_DEEP = json.loads("[" * 900 + "]" * 900)  # about as deep as Python writes it


def change_json(rng: random.Random, value: Any) -> Any:
    """`value` with one node replaced, removed, renamed or nested deeply."""
    nodes: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(min(len(node), 64)):
            nodes.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    for _ in range(rng.choice((1, 1, 2, 5))):
        node, key = rng.choice(nodes)
        with suppress(LookupError):
            match rng.randrange(6):
                case 0:
                    del node[key]
                case 1 if isinstance(node, dict):
                    node[rng.choice(("", "x", "\x1b[31m"))] = node.pop(key)
                case 2:
                    node[key] = rng.choice((_DEEP, [[[0]]]))
                case _:
                    node[key] = rng.choice(_VALUES)
    return value


def write_json(rng: random.Random, source: Path, path: Path) -> None:
    text = json.dumps(change_json(rng, json.loads(source.read_text())))
    path.write_bytes(bytes(damage(rng, text.encode())) if rng.random() < 0.2 else text.encode("utf-8", "surrogatepass"))


def change_safetensors(rng: random.Random, source: Path, path: Path) -> None:
    data = source.read_bytes()
    n = int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        path.write_bytes(damage(rng, data))
        return
    header = json.dumps(change_json(rng, json.loads(data[8 : 8 + n]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + n :])


def change_file(rng: random.Random, folder: Path, name: str) -> None:
    path = folder / name
    source = Path(shutil.copy2(path, folder / f"{name}.before"))
    if name.endswith(".json") and rng.random() < 0.8:
        write_json(rng, source, path)
    elif name.endswith(".safetensors"):
        change_safetensors(rng, source, path)
    else:
        path.write_bytes(damage(rng, source.read_bytes()))
    source.unlink()


def change_folder(name: str) -> Make:
    def make(rng: random.Random, place: Place) -> list[str]:
        folder = Path(shutil.copytree(place.mlx, place.folder / "model"))
        change_file(rng, folder, name)
        return place.run(folder, "none", "--no-memory", "--backend", "mlx")

    return make


def change_head(rng: random.Random, place: Place) -> list[str]:
    source = rng.choice([each for each in sorted(HEADS.iterdir()) if each.name != "training"])
    folder = Path(shutil.copytree(source, place.folder / "head"))
    files = sorted(each.name for each in folder.iterdir() if each.suffix in (".json", ".safetensors", ".pt", ".bin"))
    change_file(rng, folder, rng.choice(files))
    return place.run(
        place.mlx, f"{source.name.partition('-')[0]}:{folder}", "--no-memory", "--backend", "mlx", "--draft-max", "3"
    )


def change_registry(rng: random.Random, place: Place) -> list[str]:
    text = f"""[mine]
description = "Mine"
parameters = 0.006
[mine.sampling]
temperature = 0.5
[mine.gguf]
target = "{TARGET}"
draft = "{DRAFT}"
"""
    config = place.folder / "config"
    config.mkdir()
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = rng.choice(("[" * 9000, "a = 1e999", "target = 3", "[mine]", 'x = "\\uD800"', "= = =", lines[at] * 2))
    changed = "\n".join(lines).encode() if rng.random() < 0.5 else bytes(damage(rng, text.encode()))
    (config / "models.toml").write_bytes(changed)
    return rng.choice((["list"], ["plan", "mine"], place.run("mine"), ["doctor"]))


def change_stores(rng: random.Random, place: Place) -> list[str]:
    """Files that a first answer with a memory has left, one of them damaged."""
    data = place.folder / "data"
    shutil.copytree(place.mlx.parent / "data", data)
    files = sorted(path for path in data.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    path.write_bytes(damage(rng, path.read_bytes()))
    return rng.choice(
        (
            place.run(TARGET, "ngram+suffix", "--memory"),
            ["memory", "status"],
            ["memory", "export", "texts.jsonl"],
            ["memory", "clear", "--yes"],
        )
    )


@contextmanager
def answer(bodies: Callable[[str], tuple[int, dict[str, str], bytes]]) -> Iterator[str]:
    """A server on this machine that answers every request with what `bodies` says of its path."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            status, headers, body = bodies(self.path)
            with suppress(OSError):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


_LISTING = {
    "id": "me/model",
    "sha": "0" * 40,
    "siblings": [
        {"rfilename": "model-Q4_0.gguf", "size": 4096, "blobId": "1" * 40, "lfs": {"sha256": "2" * 64, "size": 4096}}
    ],
    "tags": ["gguf"],
}  # fmt: skip


def make_answers(rng: random.Random) -> Callable[[str], tuple[int, dict[str, str], bytes]]:
    status = rng.choice((200, 200, 200, 200, 206, 204, 301, 401, 404, 416, 429, 500, 503))
    body = json.dumps(change_json(rng, json.loads(json.dumps(_LISTING)))).encode()
    if rng.random() < 0.3:
        body = bytes(damage(rng, body))
    if rng.random() < 0.1:
        body = b"[" * 2_000_000
    headers = rng.choice(({}, {"ETag": '"x"'}, {"Content-Type": "text/html"}, {"Location": "/"}, {"Retry-After": "0"}))
    return lambda path: (status, dict(headers), body)


KINDS: dict[str, Make] = {
    **{
        f"gguf-{region}": change_header(region, TARGET, "model.gguf", lambda place, path: place.run(path))
        for region in ("header", "tensors", "metadata", "weights")
    },
    "gguf-draft": change_header("tensors", DRAFT, "draft.gguf", lambda place, path: place.run(TARGET, f"model:{path}")),
    "gguf-file": lambda rng, place: _write(place, damage(rng, TARGET.read_bytes())),
    "vocabulary": partial(rewrite, change=change_vocabulary),
    "template": partial(rewrite, change=change_template),
    "mlx-config": change_folder("config.json"),
    "mlx-weights": change_folder("model.safetensors"),
    "mlx-tokenizer": change_folder("tokenizer.json"),
    "mlx-tokenizer-config": change_folder("tokenizer_config.json"),
    "head": change_head,
    "registry": change_registry,
    "stores": change_stores,
}


def _write(place: Place, data: bytes | bytearray) -> list[str]:
    (place.folder / "model.gguf").write_bytes(data)
    return place.run(place.folder / "model.gguf")
