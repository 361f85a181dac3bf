"""Files that are wrong on purpose, of every format that `dpl` reads, and how `dpl` is called on each."""

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

#: What a payload writes into the folder of its case.
CANARY = "executed"

#: By name: what writes the files into a folder and returns the arguments of `dpl`.
FILES: dict[str, Callable[[Path], list[str]]] = {}


class Payload:
    """Writes the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


def _case(write: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    FILES[write.__name__.lstrip("_")] = write
    return write


def _fit(folder: Path, data: dict[str, Any], **others: Any) -> list[str]:
    config: dict[str, Any] = {
        "model": {"class_path": "SmallCNNModule", "init_args": {"channels": 4}},
        "data": data,
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-9, "expected_batch_size": 4, "accountant": "rdp"},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": "run",
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({**config, **others}))
    return ["fit", "--config", "run.yaml"]


# Arrays


def _npz(folder: Path, **arrays: Any) -> list[str]:
    whole = {"train_images": np.zeros((4, 8, 8), np.uint8), "train_labels": np.arange(4) % 2, **arrays}
    np.savez_compressed(folder / "data.npz", **whole)
    return _fit(folder, {"class_path": "NpzImages", "init_args": {"path": "data.npz"}})


def _raw_npz(folder: Path, header: str, *, content: bytes = b"", claimed: int | None = None) -> list[str]:
    """An archive whose images have this header."""
    arguments = _npz(folder)
    text = header.encode("latin1") + b"\n"
    images = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + content
    with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train_images.npy", images)
        archive.writestr("train_labels.npy", _bytes(np.save, np.arange(4) % 2))
    if claimed is not None:
        whole = (folder / "data.npz").read_bytes()
        for mark, place in ((b"PK\3\4", 22), (b"PK\1\2", 24)):  # the uncompressed sizes of the first entry
            start = whole.index(mark) + place
            whole = whole[:start] + struct.pack("<I", claimed) + whole[start + 4 :]
        (folder / "data.npz").write_bytes(whole)
    return arguments


def _bytes(save: Callable[..., Any], *content: Any) -> bytes:
    file = io.BytesIO()
    save(file, *content)
    return file.getvalue()


def _shape(shape: str) -> str:
    return f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}"


_ARRAYS: dict[str, Callable[[Path], list[str]]] = {
    "npz_label_5000000": lambda folder: _npz(folder, train_labels=np.array([0, 1, 2, 5_000_000])),
    "npz_label_uint64": lambda folder: _npz(folder, train_labels=np.array([0, 1, 2, 2**64 - 1], np.uint64)),
    "npz_label_negative": lambda folder: _npz(folder, train_labels=np.array([0, 1, 2, -(2**63)])),
    "npz_pickle": lambda folder: _npz(folder, train_labels=np.array([Payload()] * 4, dtype=object)),
    "npz_side_20000": lambda folder: _npz(folder, train_images=np.zeros((4, 20_000, 20_000), np.uint8)),
    "npz_without_pixels": lambda folder: _npz(folder, train_images=np.zeros((4, 0, 0), np.uint8)),
    "npz_5000_members": lambda folder: _npz(folder, **{f"x{i}": np.zeros(1) for i in range(5_000)}),
    "npz_header_claims_a_terabyte": lambda folder: _raw_npz(folder, _shape("(4, 500000, 500000)")),
    "npz_header_overflows": lambda folder: _raw_npz(folder, _shape("(4, 4611686018427387904, 4611686018427387904)")),
    "npz_header_negative": lambda folder: _raw_npz(folder, _shape("(4, -8, -8)")),
    "npz_header_is_code": lambda folder: _raw_npz(folder, f"__import__('os').system('touch {CANARY}')"),
    "npz_header_nests": lambda folder: _raw_npz(folder, "(" * 5_000),
    "npz_header_long": lambda folder: _raw_npz(folder, " " * 50_000_000),
    "npz_both_headers_lie": lambda folder: _raw_npz(folder, _shape("(4, 32000, 32000)"), claimed=2**32 - 2),
    "npz_truncated": lambda folder: _cut(_npz(folder), folder / "data.npz"),
    "npz_encrypted": lambda folder: _flag(_npz(folder), folder / "data.npz"),
    "npz_is_text": lambda folder: _over(_npz(folder), folder / "data.npz", b"no zip"),
    "npz_is_a_pickle": lambda folder: _over(_npz(folder), folder / "data.npz", pickle.dumps(Payload())),
}
FILES.update(_ARRAYS)


def _over(arguments: list[str], path: Path, content: bytes) -> list[str]:
    path.write_bytes(content)
    return arguments


def _cut(arguments: list[str], path: Path) -> list[str]:
    return _over(arguments, path, path.read_bytes()[: path.stat().st_size // 2])


def _flag(arguments: list[str], path: Path) -> list[str]:
    """Mark the entries of an archive as encrypted."""
    content = path.read_bytes()
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        start = content.find(mark)
        while start >= 0:
            content = content[: start + place] + b"\1\0" + content[start + place + 2 :]
            start = content.find(mark, start + 4)
    return _over(arguments, path, content)


# Images


def _photos(folder: Path, name: str, content: bytes | None) -> list[str]:
    from PIL import Image

    for label in ("a", "b"):
        (folder / "photos" / "train" / label).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "photos" / "train" / label / "0.png")
    if content is not None:
        (folder / "photos" / "train" / "a" / name).write_bytes(content)
    (folder / "photos" / "test").symlink_to("train")
    data = {"class_path": "ImageFolder", "init_args": {"root": "photos", "image_size": 8, "read_first": True}}
    return _fit(folder, data, privacy={"noise_multiplier": 1.0, "delta": 1e-9, "expected_batch_size": 2})


def _png(width: int, height: int, *, rows: bool = False, extra: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    pixels = zlib.compress(bytes((width * 3 + 1) * height), 9) if rows else b""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    others = chunk(extra[:4], extra[4:]) if extra else b""
    return b"\x89PNG\r\n\x1a\n" + head + others + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def _jpeg(width: int, height: int) -> bytes:
    from PIL import Image

    content = _bytes(lambda file: Image.new("RGB", (8, 8)).save(file, "JPEG"))
    place = content.index(b"\xff\xc0") + 5
    return content[:place] + struct.pack(">HH", height, width) + content[place + 4 :]


def _tiff(width: int, height: int, following: int = 0) -> bytes:
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    tags += [(277, 3, 1, 1), (278, 4, 1, height), (279, 4, 1, 2**31)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + struct.pack("<I", following)


_EPS = f"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
(%pipe%touch {CANARY}) (w) file closefile
({CANARY}) (w) file closefile
showpage
%%EOF
"""
_ZEROS = zlib.compress(bytes(300_000_000), 9)
_GIF = b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\x80\0\0" + bytes(6) + b";"
_BMP = b"BM" + bytes(12) + struct.pack("<IiiHHIIiiII", 40, 2**31 - 1, 2**31 - 1, 1, 24, *[0] * 6)
_WEBP = b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xfe\x3f\0" * 2
_IMAGES = {
    "png_a_million_squared": (".png", lambda: _png(10**6, 10**6)),
    "png_13000_squared": (".png", lambda: _png(13_000, 13_000, rows=True)),
    "png_without_size": (".png", lambda: _png(0, 0)),
    "png_truncated": (".png", lambda: _png(100, 100, rows=True)[:80]),
    "png_text_bomb": (".png", lambda: _png(8, 8, rows=True, extra=b"zTXtx\0\0" + _ZEROS)),
    "png_profile_bomb": (".png", lambda: _png(8, 8, rows=True, extra=b"iCCPx\0\0" + _ZEROS)),
    "jpeg_65500_squared": (".jpg", lambda: _jpeg(65_500, 65_500)),
    "jpeg_without_size": (".jpg", lambda: _jpeg(0, 0)),
    "jpeg_truncated": (".jpg", lambda: _jpeg(8, 8)[:200]),
    "jpeg_start_and_end": (".jpg", lambda: b"\xff\xd8\xff\xd9"),
    "gif_65535_squared": (".png", lambda: _GIF),
    "bmp_two_billion": (".bmp", lambda: _BMP),
    "tiff_a_million_squared": (".tif", lambda: _tiff(10**6, 10**6)),
    "tiff_that_follows_itself": (".tif", lambda: _tiff(8, 8, following=8)),
    "ppm_a_million_squared": (".ppm", lambda: b"P6 1000000 1000000 255\n"),
    "ppm_long_number": (".ppm", lambda: b"P6 " + b"9" * 5_000_000),
    "webp_16383_squared": (".webp", lambda: _WEBP),
    "postscript_as_png": (".png", lambda: _EPS.encode()),
    "empty_png": (".png", lambda: b""),
    "pickle_as_png": (".png", lambda: pickle.dumps(Payload())),
}


def _image(suffix: str, content: Callable[[], bytes]) -> Callable[[Path], list[str]]:
    return lambda folder: _photos(folder, f"x{suffix}", content())


FILES.update({name: _image(*facts) for name, facts in _IMAGES.items()})


@_case
def image_of_20_gigabytes(folder: Path) -> list[str]:
    arguments = _photos(folder, "x.jpg", _jpeg(8, 8))
    os.truncate(folder / "photos" / "train" / "a" / "x.jpg", 20 * 10**9)
    return arguments


@_case
def image_is_a_link_to_itself(folder: Path) -> list[str]:
    arguments = _photos(folder, "", None)
    (folder / "photos" / "train" / "a" / "x.png").symlink_to("x.png")
    os.mkfifo(folder / "photos" / "train" / "a" / "y.png")
    (folder / "photos" / "train" / "a" / "z.png").symlink_to("/dev/zero")
    (folder / "photos" / "train" / "loop").symlink_to("loop")
    return arguments


@_case
def tiny_imagenet_in_latin1(folder: Path) -> list[str]:
    (folder / "wnids.txt").write_bytes(b"\xff\xfe\xe9\n")
    return _fit(folder, {"class_path": "TinyImageNet", "init_args": {"root": "."}})


# Checkpoints, weights, statements, journals


def _torch(content: Any, **settings: Any) -> bytes:
    import torch

    return _bytes(lambda file: torch.save(content, file, **settings))


def _checkpoint(**changed: Any) -> dict[str, Any]:
    whole = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {},
        "hyper_parameters": {},
        "callbacks": {},
        "epoch": 0,
    }
    return {**whole, "global_step": 1, "loops": {}, "optimizer_states": [], "lr_schedulers": [], **changed}


def _of_checkpoint(content: Callable[[], bytes], command: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "x.ckpt").write_bytes(content())
        fit = _fit(folder, {"class_path": "Digits"})
        return {
            "verify": ["verify", "x.ckpt"],
            "export": ["export", "--ckpt_path", "x.ckpt", "--out", "out"],
            "fit": [*fit, "--ckpt_path", "x.ckpt"],
            "test": ["test", "--config", "run.yaml", "--ckpt_path", "x.ckpt"],
        }[command]

    return write


def _bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number in range(40):
            archive.writestr(f"archive/data/{number}", bytes(100_000_000))
    return file.getvalue()


_CHECKPOINTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "checkpoint_runs_code": (lambda: _torch(Payload()), "test"),
    "checkpoint_runs_code_inside": (lambda: _torch(_checkpoint(hyper_parameters={"a": Payload()})), "fit"),
    "checkpoint_of_before_zip_runs_code": (lambda: _torch(Payload(), _use_new_zipfile_serialization=False), "verify"),
    "checkpoint_bomb": (_bomb, "test"),
    "checkpoint_truncated": (lambda: _torch(_checkpoint())[:500], "fit"),
    "checkpoint_is_a_list": (lambda: _torch([1]), "export"),
    "checkpoint_settings_are_a_list": (lambda: _torch(_checkpoint(hyper_parameters=[1])), "test"),
    "checkpoint_names_code": (lambda: _torch(_checkpoint(hyper_parameters={"_class_path": "os.system"})), "test"),
    "checkpoint_callbacks_are_text": (lambda: _torch(_checkpoint(callbacks="x")), "fit"),
    "checkpoint_without_weights": (lambda: _torch(_checkpoint(state_dict=None)), "test"),
    "checkpoint_without_loops": (
        lambda: _torch(_checkpoint(private_run={"version": 2, "statement": {"run": [1]}, "settings": {}, "step": {}})),
        "fit",
    ),
    "checkpoint_statement_is_text": (lambda: _torch(_checkpoint(private_run="x")), "export"),
    "checkpoint_statement_is_empty": (lambda: _torch(_checkpoint(private_run={})), "verify"),
}
FILES.update({name: _of_checkpoint(*facts) for name, facts in _CHECKPOINTS.items()})


def _weights(name: str, content: Callable[[], bytes]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / name).write_bytes(content())
        model = {"class_path": "TimmModule", "init_args": {"name": "test_efficientnet_gn", "weights": name}}
        return _fit(folder, {"class_path": "Digits"}, model=model)

    return write


def _safetensors(header: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if claimed is None else claimed) + header


_TENSOR = b'{"a": {"dtype": "F32", "shape": [1000000000, 1000000000], "data_offsets": [0, 4]}}'
FILES.update(
    {
        "safetensors_header_claims_all": _weights("x.safetensors", lambda: _safetensors(b"{}", 2**63)),
        "safetensors_shape_lies": _weights("x.safetensors", lambda: _safetensors(_TENSOR) + bytes(4)),
        "safetensors_nests": _weights("x.safetensors", lambda: _safetensors(b'{"a":' * 50_000)),
        "weights_run_code": _weights("x.pth", lambda: _torch(Payload())),
        "weights_are_a_pickle": _weights("x.bin", lambda: pickle.dumps(Payload())),
        "weights_are_a_number": _weights("x.pth", lambda: _torch(1)),
        "weights_archive_runs_code": _weights("x.npz", lambda: _bytes(np.savez, np.array([Payload()], dtype=object))),
    }
)


def _verified(statement: str | None, journal: str | None = None) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "run").mkdir()
        (folder / "run" / "privacy_statement.json").write_text("{}" if statement is None else statement)
        if journal is not None:
            (folder / "run" / "privacy_journal_x.jsonl").write_text(journal)
        return ["verify", "run"]

    return write


_STEP = '{"step": "a", "noise_multiplier": 1, "sample_rate": 0.1, "number": %s, "after": [], "nonce": "b"}\n'
FILES.update(
    {
        "statement_nests": _verified('{"a":' * 200_000),
        "statement_is_a_list": _verified("[1]"),
        "statement_of_300_megabytes": _verified(" " * 300_000_000),
        "statement_number_without_end": _verified('{"noise_multiplier": ' + "9" * 100_000 + "}"),
    }
)


def _beside_checkpoint(journal: str) -> Callable[[Path], list[str]]:
    """A checkpoint of the run `x` with a hostile journal beside it."""

    def write(folder: Path) -> list[str]:
        from dp_lightning.privacy import Ledger, PrivacyPlan, PrivacyStatement
        from dp_lightning.private_run.resume import SavedRun

        plan = PrivacyPlan(num_train=9, expected_batch_size=3, num_steps=2, noise_multiplier=1.0, delta=1e-3)
        facts: dict[str, Any] = {"clipping": {}, "sensitivity": 1.0, "sampler": "", "run": "x", "journal_head": "a"}
        statement = PrivacyStatement(plan=plan, ledger=Ledger(), **facts)
        saved = _checkpoint()
        SavedRun(statement=statement, settings={}, step={}).write(saved)
        arguments = _of_checkpoint(lambda: _torch(saved), "verify")(folder)
        (folder / "privacy_journal_x.jsonl").write_text(journal)
        return arguments

    return write


FILES.update(
    {
        "journal_number_is_infinite": _beside_checkpoint(_STEP % "1e999"),
        "journal_nests": _beside_checkpoint("[" * 200_000 + "\n"),
        "journal_of_zeros": _beside_checkpoint("\0" * 100_000),
    }
)


# Configurations and grids


def _config(content: bytes) -> Callable[[Path], list[str]]:
    return lambda folder: _over(["fit", "--config", "x.yaml"], folder / "x.yaml", content)


def _grid(content: bytes) -> Callable[[Path], list[str]]:
    return lambda folder: _over(["sweep", "x.yaml", "--dry-run"], folder / "x.yaml", content)


_ALIASES = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else '1'}]" for i in range(12)).encode()
_AXIS = "  a{}: {{setting: seed_everything, values: [{}]}}\n"
_PRODUCT = "axes:\n" + "".join(_AXIS.format(i, ", ".join(map(str, range(100)))) for i in range(9))
FILES.update(
    {
        "yaml_aliases": _config(_ALIASES),
        "yaml_nests": _config(b"[" * 100_000),
        "yaml_of_30_megabytes": _config(b"a: " + b"x" * 30_000_000),
        "yaml_in_utf16": _config("model: x".encode("utf-16")),
        "yaml_is_binary": _config(bytes(range(256))),
        "yaml_runs_code": _config(f"model: !!python/object/apply:os.system [touch {CANARY}]".encode()),
        "grid_aliases": _grid(_ALIASES),
        "grid_nests": _grid(b"axes: " + b"[" * 100_000),
        "grid_runs_code": _grid(f"axes: !!python/object/apply:os.system [touch {CANARY}]".encode()),
        "grid_without_end": _grid(_PRODUCT.encode()),
        "grid_of_itself": _grid(b"base: [x.yaml]\naxes: {seed: {setting: seed_everything, values: [1]}}"),
    }
)


@_case
def report_of_wrong_results(folder: Path) -> list[str]:
    """Results of a kind that a run does not write, in the folder of a run of a grid."""
    from dp_lightning.commands.sweep import planned_runs
    from dp_lightning.experiments.grid import Grid

    _fit(folder, {"class_path": "Digits"})
    (folder / "x.yaml").write_text("base: [run.yaml]\naxes: {seed: {setting: seed_everything, values: [1]}}")
    (run,) = planned_runs(Grid.load(folder / "x.yaml"), folder / "out", [])
    names = ["completed", "num_steps", "num_steps_planned", "epsilon", "delta", "seconds"]
    wrong = [
        dict.fromkeys([*names, "test_accuracy_last", "test_accuracy_best"], value) for value in ([], {}, "x", None)
    ]
    for number, text in enumerate(["[" * 100_000, "[]", "9" * 9_999, *map(json.dumps, wrong), "{}"]):
        place = run.folder.root / str(number)
        place.mkdir(parents=True)
        (place / "result.json").write_text(text)
    finished = {**wrong[2], "completed": True}
    (run.folder.root / "7" / "result.json").write_text(json.dumps(finished))
    return ["report", "x.yaml", "--out", "out"]
