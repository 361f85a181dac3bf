"""Configurations and files that are wrong on purpose: does `dpl` answer each with one message, and quickly?

Every case runs `dpl` in its own process, forked from one that has done the imports, in an empty folder. Counted as a
fault: a traceback, an exit status other than 0, 1 and 2, a file that a payload would write, more than 1 GB of memory
beyond the imports, an answer other than a trained model after more than 2 seconds of processor time.

    python benchmarks/fuzz.py --configurations 500 --seed 0
"""

import argparse
import copy
import json
import math
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hostile_files
import yaml

CONFIGS = Path(__file__).parents[1] / "configs"
#: Memory beyond the imports that a case may take, and seconds until it has answered.
MOST_MEMORY, MOST_SECONDS = 1e9, 2.0
# A valid run takes one step; a process that hangs is ended after this many seconds.
_LONGEST = 60.0
# A payload writes this file in the folder of its case.
CANARY = hostile_files.CANARY
_PAYLOAD = f"open('{CANARY}', 'w')"

_WORDS = [
    "",
    "ten",
    "nan",
    "inf",
    "-inf",
    "null",
    "1e5",
    "é漢字🙂",
    "\u202e",
    "a b",
    "x" * 20_000,
    "${HOME}",
    "%s%n",
    "=0",
]
_PATHS = [
    "loop",
    "loop/loop",
    "/dev/null",
    "/dev/zero",
    ".",
    "run.yaml",
    "no/such/file",
    "file:///etc/passwd",
    "~",
    "://",
]
_CODE = [
    "os.system",
    "builtins.exec",
    "subprocess.Popen",
    "no.such.module",
    "dp_lightning",
    "torch.optim.SGD",
    "..",
    "a.",
]
_NUMBERS = [0, 1, -1, 2, 2**31, 2**63, 2**64, -(2**63), 10**30, int("9" * 4000), 0.5, -0.5, 1e-300, 1e300, -1e300]
_FLOATS = [math.inf, -math.inf, math.nan, 1e-45, 1e12, 1e-12]
_OTHERS: list[Any] = [None, True, False, [], {}, [[]], [{}], {"": None}, {None: 1}, {1: 2}, [None], ["a", 1, {}]]
_CLASSES: list[Any] = [{"class_path": name, "init_args": {}} for name in _CODE]
_CLASSES += [{"class_path": "subprocess.Popen", "init_args": {"args": ["touch", CANARY]}}, {"init_args": {}}]
_CLASSES += [
    {"class_path": "builtins.exec", "init_args": {"source": _PAYLOAD}},
    {"class_path": None},
    {"class_path": {}},
]
# PyYAML cannot write them.
_DEEP = [f"nested lists: {depth}" for depth in (5, 90, 300, 900)]
_TAGS = [f"!!python/object/apply:os.system ['touch {CANARY}']", f"!!python/object/new:os.system [touch {CANARY}]"]
_TAGS += ["!!python/name:os.system", "!!binary '!'", "!!set {a, b}", "!!timestamp 2024-99-99", "!!int x", "!!float y"]
_TAGS += ["2024-99-99", "1:99:99:99", "0b", "0x_", "&a [*a]", "*nothing", "!!merge x", "? [a, b]\n: c", "@", "`", "\t"]

SMALL: dict[str, Any] = {
    "seed_everything": 1,
    "model": {"class_path": "SmallCNNModule", "init_args": {"channels": 4}},
    "data": {
        "class_path": "Digits",
        "init_args": {
            "val_fraction": 0.1,
            "eval_batch_size": 512,
            "split_seed": 0,
            "num_workers": 0,
            "augment": True,
            "mean": [0.3],
            "std": [0.4],
        },
    },
    "privacy": {
        "target_epsilon": 3.0,
        "noise_multiplier": None,
        "delta": 1e-4,
        "expected_batch_size": 64,
        "max_grad_norm": 1.0,
        "max_physical_batch_size": 64,
        "clipping": "flat",
        "clip_factor": "abadi",
        "augmult": 1,
        "accountant": "rdp",
        "reproducible": False,
    },
    "postprocess": {
        "transforms": [
            {"class_path": "Momentum", "init_args": {"beta": 0.9}},
            {"class_path": "Scale", "init_args": {"factor": 0.5}},
        ]
    },
    "averaging": {"decay": 0.99},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}},
    "lr_scheduler": {"class_path": "WarmupCosine", "init_args": {"warmup_fraction": 0.05}},
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": "run",
        "log_every_n_steps": 1,
        "check_val_every_n_epoch": 1,
    },
}


@dataclass(frozen=True)
class Case:
    """One call of `dpl`, and the files that it finds."""

    name: str
    write: Callable[[Path], list[str]]
    """Writes the files into a folder; returns the arguments of `dpl`."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: faults in words, and what it took."""

    name: str
    status: int
    seconds: float
    memory: float
    faults: tuple[str, ...]
    said: str


def configurations(count: int, seed: int) -> Iterator[Case]:
    """`count` configurations, the same for the same seed: changed versions of those of `configs` and of a small one."""
    chance = random.Random(seed)
    fragments = [yaml.safe_load(path.read_text()) for path in sorted(CONFIGS.glob("fragments/postprocess/*.yaml"))]
    bases = [SMALL, *({**SMALL, **fragment} for fragment in fragments)]
    bases += [_one_step(yaml.safe_load(path.read_text())) for path in sorted(CONFIGS.glob("*.yaml"))]
    for number in range(count):
        kind = chance.choices(["number", "tree", "text", "option"], [6, 4, 2, 2])[0]
        base = copy.deepcopy(chance.choice(bases))
        options: list[str] = []
        if kind == "option":
            options = _changed_option(base, chance)
        for _ in range(chance.choice([1, 1, 1, 2, 3]) if kind == "tree" else 0):
            _change(base, chance)
        for _ in range(chance.choice([1, 1, 2, 3]) if kind == "number" else 0):
            _change_number(base, chance)
        content = _text(base).encode(errors="replace")
        if kind == "text":
            content = _changed_text(content, chance)
        command = chance.choices(["fit", "validate", "test", "predict"], [17, 1, 1, 1])[0]
        yield Case(f"{number}-{kind}", _writer(content, [command, "--config", "run.yaml", *options]))


def _text(config: dict[str, Any]) -> str:
    text = yaml.safe_dump(config, allow_unicode=True)
    for name in _DEEP:
        depth = int(name.removeprefix("nested lists: "))
        text = text.replace(f"'{name}'", "[" * depth + "]" * depth)
    return text


def _writer(content: bytes, arguments: list[str]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "run.yaml").write_bytes(content)
        (folder / "loop").symlink_to("loop")
        return arguments

    return write


def _one_step(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of `configs`, cut to one step; its files are not there, so most end with the missing data."""
    config["trainer"] |= {**SMALL["trainer"], "devices": 1}
    config["privacy"]["accountant"] = "rdp"
    config["data"].setdefault("init_args", {})
    return config


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _value(chance: random.Random) -> Any:
    kinds = [_WORDS, _PATHS, _CODE, _NUMBERS, _FLOATS, _OTHERS, _CLASSES]
    value = copy.deepcopy(chance.choice(chance.choices(kinds, [2, 2, 1, 4, 3, 3, 2])[0]))
    if chance.random() < 0.03:
        value = chance.choice(_DEEP)
    if chance.random() < 0.01:
        value = [value] * 100_000
    return value


def _change_number(tree: dict[str, Any], chance: random.Random) -> None:
    """Replace a number by another one of the same kind, which a parser lets through."""
    places = [place for place in _places(tree) if place[-1] not in ("devices", "num_nodes")]
    numbers = [(place, value) for place in places if type(value := _at(tree, place)) in (int, float)]
    place, value = chance.choice(numbers)
    whole = [*range(-1, 10), *(10**k for k in range(1, 9)), 2**31, 2**53, 2**62, -(2**31), 100, 1437, 1024, 4096]
    real = [0.0, -0.0, 1.0, -1.0, 1.5, 1e-3, 1e-9, 1e-30, 1e-300, 5e-324, 1e3, 1e6, 1e7, 1e12, 1e30, 3e38, 1e39, 1e300]
    _at(tree, place[:-1])[place[-1]] = chance.choice(whole if isinstance(value, int) else [*real, *_FLOATS])


def _at(tree: Any, place: Sequence[Any]) -> Any:
    for step in place:
        tree = tree[step]
    return tree


def _change(tree: dict[str, Any], chance: random.Random) -> None:
    """One change in place."""
    places = list(_places(tree))
    if not places:
        return
    *path, key = chance.choice(places)
    parent = tree
    for step in path:
        parent = parent[step]
    kind = chance.choices(["value", "remove", "rename", "unknown", "wrap", "swap"], [12, 2, 1, 1, 1, 2])[0]
    if kind == "value":
        parent[key] = _value(chance)
    elif kind == "remove":
        del parent[key]
    elif kind == "wrap":
        parent[key] = chance.choice([[parent[key]], {"class_path": parent[key]}, {"init_args": parent[key]}])
    elif kind == "swap":
        other = chance.choice([place for place in places if len(place) == 1])[0]
        parent[key], tree[other] = copy.deepcopy(tree.get(other)), copy.deepcopy(parent[key])
    elif isinstance(parent, dict):
        name = str(key) + "x" if kind == "rename" else chance.choice(["", "self", "__class__", "é", "a.b", "ckpt_path"])
        parent[name] = parent.pop(key) if kind == "rename" else _value(chance)


def _changed_text(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    lines = content.split(b"\n")
    kind = chance.choice(["cut", "byte", "insert", "tag", "aliases", "deep", "line", "long"])
    if kind == "cut":
        return content[:place]
    if kind == "byte":
        return content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :]
    if kind == "insert":
        inserted = chance.choice(
            [b"\0", b"\xff\xfe", b"\t", b"{" * 3000, b"---\n", b"...\n", b"%YAML 9.9\n", b"&a ", b"\r"]
        )
        return content[:place] + inserted + content[place:]
    if kind == "tag":
        number = chance.randrange(len(lines))
        key = lines[number].partition(b":")[0]
        lines[number] = key + b": " + chance.choice(_TAGS).encode()
        return b"\n".join(lines)
    if kind == "aliases":
        steps = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else '1'}]" for i in range(12))
        return content + b"\n" + steps.encode() if chance.random() < 0.5 else steps.encode() + b"\n" + content
    if kind == "deep":
        depth = chance.choice([50, 1_000, 50_000])
        return content + b"\nmodel: " + b"[" * depth + b"]" * depth
    if kind == "line":
        chance.shuffle(lines)
        return b"\n".join(lines)
    return content + b"\nmodel: " + b"x" * 20_000_000


def _changed_option(base: dict[str, Any], chance: random.Random) -> list[str]:
    path = chance.choice([place for place in _places(base) if all(isinstance(step, str) for step in place)])
    value = chance.choice([_value(chance), chance.choice(_TAGS)])
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    text = text.replace("\0", "")[:100_000]
    return [f"--{'.'.join(path)}", text] if chance.random() < 0.3 else [f"--{'.'.join(path)}={text}"]


def files() -> Iterator[Case]:
    """One case for each hostile file."""
    for name, write in hostile_files.FILES.items():
        yield Case(name, write)


def run(cases: Sequence[Case], *, jobs: int = 1) -> Iterator[Outcome]:
    """Run each case; the imports are done once."""
    _import_all()
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(_run, cases)


def _import_all() -> None:
    """Import what `dpl` imports before it reads anything, and what it imports on demand."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "https_proxy": "http://127.0.0.1:9"}
    import onnx  # noqa: F401
    import safetensors.torch  # noqa: F401
    import timm.data  # noqa: F401
    import torch
    import torch.utils.tensorboard
    from sklearn.datasets import load_digits

    import dp_lightning.commands.analyze
    import dp_lightning.commands.composition
    import dp_lightning.commands.export
    import dp_lightning.commands.report
    import dp_lightning.commands.sweep
    import dp_lightning.commands.verify  # noqa: F401

    torch.set_num_threads(1)
    load_digits()


def _run(case: Case) -> Outcome:
    with TemporaryDirectory() as place:
        folder = Path(place) / "a" / "b"
        folder.mkdir(parents=True)
        arguments = case.write(folder)
        started = time.monotonic()
        process = os.fork()
        if process == 0:
            _become(folder, arguments)
        status, peak, seconds = _watched(process, started + _LONGEST)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        before = float((folder / ".before").read_text())
        said = (folder / ".said").read_text(errors="replace")
        canary = any(Path(place).rglob(CANARY))
    return Outcome(
        case.name, status, seconds, peak - before, _faults(status, seconds, peak - before, said, canary), said
    )


def _faults(status: int, seconds: float, memory: float, said: str, canary: bool) -> tuple[str, ...]:
    found = []
    if "Traceback (most recent call last)" in said:
        found.append("traceback")
    if status not in (0, 1, 2):
        found.append(f"status {status}")
    if canary:
        found.append("code executed")
    if memory > MOST_MEMORY:
        found.append(f"{memory / 1e9:.1f} GB")
    if seconds > MOST_SECONDS and status != 0:
        found.append(f"{seconds:.1f} s")
    return tuple(found)


def _become(folder: Path, arguments: Sequence[str]) -> None:
    """The forked process: run `dpl`, and never return."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        said = os.open(".said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, nothing), (1, said), (2, said)):
            os.dup2(file, number)
        Path(".before").write_text(str(_resident()))
        # Far above what is allowed, to protect the machine from what is found.
        limit = _virtual() + 6 * 10**9
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        from dp_lightning.cli import main

        _stop_after_one_step()
        try:
            main(list(arguments))
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status % 256)


def _stop_after_one_step() -> None:
    """Stop after the first step: what follows is training, not an answer to the configuration."""
    from dp_lightning.callbacks.privacy import PrivacyCallback

    after_batch = PrivacyCallback.on_train_batch_end

    def stop(self: PrivacyCallback, trainer: Any, *arguments: Any) -> None:
        after_batch(self, trainer, *arguments)
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0

    PrivacyCallback.on_train_batch_end = stop  # type: ignore[method-assign]


def _watched(process: int, until: float) -> tuple[int, float, float]:
    """Exit status, or the negative signal that has ended it; the most bytes resident; seconds of processor time."""
    while True:
        found, status, used = os.wait4(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024, used.ru_utime + used.ru_stime
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        time.sleep(0.01)


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", help="names of the cases to run, separated by commas")
    parser.add_argument("--no-files", action="store_true", help="leave the hostile files out")
    parser.add_argument("--show", action="store_true", help="print what each case has said")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse(sys.argv[1:])
    cases = [*configurations(options.configurations, options.seed)]
    cases += [] if options.no_files else files()
    if options.only:
        cases = [case for case in cases if case.name in options.only.split(",")]
    ended: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    most, slowest = (0.0, ""), (0.0, "")
    for outcome in run(cases, jobs=options.jobs):
        ended[outcome.status] += 1
        most = max(most, (outcome.memory, outcome.name))
        slowest = max(slowest, (outcome.seconds if outcome.status else 0.0, outcome.name))
        if outcome.faults or options.show:
            print(f"{outcome.name}: {', '.join(outcome.faults) or outcome.status} ({outcome.seconds:.1f} s)")
            print("    " + "\n    ".join(line[:300] for line in outcome.said.strip().splitlines()[-12:]), flush=True)
        kinds.update(fault.split()[-1] if fault[0].isdigit() else fault for fault in outcome.faults)
    print(
        f"{len(cases)} cases, seed {options.seed}; status: {dict(sorted(ended.items()))}; faults: {dict(kinds)}; "
        f"most memory {most[0] / 1e6:.0f} MB ({most[1]}), slowest answer {slowest[0]:.1f} s ({slowest[1]})"
    )
    sys.exit(1 if kinds else 0)


if __name__ == "__main__":
    main()
