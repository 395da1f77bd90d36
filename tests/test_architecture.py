"""The layers hold: who may import whom is a table, and a machine keeps it. Every source file is in the wheel; every word is documented."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("storage", "validators", "jobs", "configs")
MOST_LINES = 400

# From the ground up: a layer may import itself and every layer above it in this list, never one below. In a layer marked
# + (plug-ins) a file may import of its own folder only what begins with an underscore. A dotted name is one file.
LAYERS: list[tuple[str, ...]] = [
    ("errors", "units", "model", "configs"),  # frozen data and the exception tree
    ("ports", "codes"),  # protocols; the table of finding codes
    ("silences", "plan", "priority", "identity"),  # small records that commands pass down
    ("settings",),  # the only reader of configuration
    ("judge",),  # pure decisions
    ("values",),  # what an element's bits mean, statistics of buffers: containers need element sizes
    ("digest",),  # hash and CRC of buffers
    ("storage+",),
    ("places", "decisions"),  # where things of ours lie in a store; one decision for many ranks
    ("formats+",),
    ("scan",),  # one pass over one file, for facts and seals
    ("seals",),
    ("logs+",),
    ("layouts+",),
    ("facts",),
    ("report.document",),  # the written form of a report, in which verdicts are kept
    ("verdicts",),
    ("curves+",),
    ("megatron_integrity",),
    ("validators+",),
    ("registry", "discover"),
    ("checking", "targets", "unmoved"),
    ("look",),
    ("inspect",),
    ("sealing", "quarantine"),
    (
        "replicas",
        "replica_look",
        "arriving",
        "onto_disk",
        "replicate",
        "staging",
        "replicate_many",
        "repair",
        "mending",
        "repair_one",
        "replica_report",
    ),
    ("prune", "prune_run"),
    ("record",),
    ("restore",),
    ("hypotheses+",),
    ("report",),  # pages and plots
    ("alerts+",),
    ("catalog",),  # keeps the outbox of alerts
    ("jobs",),
    ("gate", "integrations"),
    ("web", "demo"),
    ("cli+", "__main__", "testing"),
]

# Arrows against the order or between neighbours, each with its reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("formats", "formats.pickles"): "the pickle reader is what containers share",
    ("formats", "formats.reconstruct"): "the allow-list of the pickle reader",
    ("formats.dcp_items", "formats.torch_zip"): "every item of a DCP shard is an archive of its own",
    ("formats.dcp_items", "formats.dcp_metadata"): "the index that says where the items lie",
    ("formats.dcp_items", "formats.safetensors"): "a shard that the Hugging Face writer of DCP wrote",
    ("formats.dcp_metadata", "formats.bare_pickle"): "the index is one pickle",
    ("logs.search", "logs"): "finds the reader for a log, of all that there are",
    ("storage.opening", "storage"): "finds the store for a URL, of all that there are",
    ("storage.transfer", "storage.checksums"): "a verified copy compares checksums of both sides",
    ("cli.history", "cli.serve"): "looks at the catalog that the service keeps",
    ("cli.jobs", "cli.serve"): "looks at the catalog that the service keeps",
    ("cli.jobs", "cli.history"): "prints its tables in the same form",
    ("cli.run", "cli.preflight"): "the gate is a preflight and a command",
}

# Modules that no layer below may pay for.
HEAVY = {
    "torch",
    "boto3",
    "botocore",
    "transformers",
    "sqlalchemy",
    "fastapi",
    "apscheduler",
    "deepspeed",
    "lightning",
}


@cache
def sources() -> tuple[Path, ...]:
    """Every source file of the product."""
    return tuple(
        sorted(
            p
            for top in ("ckptguard", *MAPPED)
            for p in (ROOT / top).rglob("*.py")
            if "__pycache__" not in p.parts
        )
    )


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "ckptguard" else ("ckptguard", *parts))
    return name.removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def known() -> frozenset[str]:
    return frozenset(module_of(p) for p in sources())


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    """Every module that a file imports, at the top or inside functions. Types-only imports are no arrows."""
    found: list[tuple[str, int]] = []
    tree = tree_of(path)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    package = module_of(path).split(".")
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = package if path.name == "__init__.py" else package[:-1]
                base = ".".join([*here[: len(here) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.append((inner if inner in known() else base, node.lineno))
    return tuple(found)


@cache
def layer_of(module: str) -> tuple[int, str, bool] | None:
    """(the number of its layer, its entry there, whether its files are kept apart); None for the package itself."""
    parts = module.split(".")[1:]
    if not parts:
        return None
    best: tuple[int, tuple[int, str, bool]] | None = None
    for number, names in enumerate(LAYERS):
        for entry in names:
            own = entry.rstrip("+").split(".")
            testing = entry == "testing" and parts[0].startswith("testing_")
            if (parts[: len(own)] == own or testing) and (best is None or len(own) > best[0]):
                best = (len(own), (number, entry.rstrip("+"), entry.endswith("+")))
    if best is None:
        raise AssertionError(
            f"{module} is in no layer: add it to LAYERS, where what it imports lies above it"
        )
    return best[1]


def is_allowed(own: str, target: str) -> bool:
    """Whether the table excuses an arrow: between the two files, or from a whole folder."""
    return any(
        own.startswith(a) and (target == b or (target.startswith(f"{b}.") and "." not in b))
        for a, b in ALLOWED
    )


def test_no_arrow_points_down() -> None:
    wrong = []
    for path in sources():
        own = module_of(path)
        mine = layer_of(own)
        for target, line in imports_of(path):
            theirs = layer_of(target) if target.startswith("ckptguard.") else None
            if mine is None or theirs is None or is_allowed(own[10:], target[10:]):
                continue
            where = f"{path.relative_to(ROOT)}:{line}: {own} imports {target}"
            if theirs[0] > mine[0]:
                wrong.append(f"{where}, which lies below it")
            elif mine[1] == theirs[1] and mine[2] and not is_shared(own, target):
                wrong.append(f"{where}, its neighbour")
    assert not wrong, "\n".join(wrong)


def is_shared(own: str, target: str) -> bool:
    """Whether an import within a folder of plug-ins is of what they share."""
    private = [part for module in (own, target) for part in module.split(".")[2:] if part.startswith("_")]
    return bool(private) or own.count(".") == 1 or target.count(".") == 1


def test_excuses_are_still_needed() -> None:
    arrows = {(module_of(p)[10:], target[10:]) for p in sources() for target, _ in imports_of(p)}
    idle = [
        excuse
        for excuse in ALLOWED
        if not any(o.startswith(excuse[0]) and f"{t}.".startswith(f"{excuse[1]}.") for o, t in arrows)
    ]
    assert not idle, idle


def test_the_waist_needs_the_standard_library_only() -> None:
    for name in ("model", "errors", "ports", "units", "codes", "judge"):
        for path in sources():
            if f"{module_of(path)}.".startswith(f"ckptguard.{name}."):
                for target, line in imports_of(path):
                    top = target.split(".")[0]
                    assert top == "ckptguard" or top in sys.stdlib_module_names, (
                        f"{path}:{line} imports {target}"
                    )


def test_only_the_scheduler_knows_apscheduler() -> None:
    found = {
        module_of(p)
        for p in sources()
        for target, _ in imports_of(p)
        if target.split(".")[0] == "apscheduler"
    }
    assert all(m.startswith("ckptguard.jobs") for m in found), found
    assert len(found) <= 1


def test_our_code_never_unpickles() -> None:
    """Loading is for the restore, the recorder, the demo and the tests' tools: never for looking."""
    loaders = {"pickle.load", "pickle.loads", "torch.load", "numpy.load", "np.load"}
    may = (
        "ckptguard.restore",
        "ckptguard.record",
        "ckptguard.demo",
        "ckptguard.testing",
        "ckptguard.integrations",
    )
    wrong = []
    for path in sources():
        if module_of(path).startswith(may):
            continue
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
            ):
                called = f"{node.func.value.id}.{node.func.attr}"
                if called in loaders:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {called}")
    assert not wrong, "\n".join(wrong)


def test_short_names_are_banned_and_nobody_uses_them() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    banned = settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(MAPPED) <= banned.keys()
    for path in (*sources(), *(ROOT / "tests").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            assert not {n.split(".")[0] for n in names} & set(MAPPED), f"{path}:{node.lineno}"  # type: ignore[attr-defined]


def test_files_stay_short() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text().splitlines())) > MOST_LINES
    }
    assert not long, long


def test_every_module_says_what_it_is_for() -> None:
    silent = []
    for path in sources():
        tree = tree_of(path)
        top = {
            n.targets[0].id
            for n in tree.body
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
        }
        # A check's file holds one class, and that is what speaks.
        if tree.body and ast.get_docstring(tree) is None and not top & {"CHECK", "RUN_CHECK"}:
            silent.append(str(path.relative_to(ROOT)))
    assert not silent, silent


def test_importing_the_command_line_is_light() -> None:
    """`ckptguard --help` must come at once on a laptop without a GPU stack."""
    code = (
        "import sys; sys.argv = ['ckptguard', '--help']\n"
        "from ckptguard.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        f"loaded = {HEAVY!r} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in commands():
        assert name in done.stdout


def commands() -> list[str]:
    """The commands that a user sees."""
    import typer

    from ckptguard.cli import build_app

    group = typer.main.get_command(build_app())
    return sorted(n for n, c in group.commands.items() if not c.hidden)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", commands())
def test_each_command_teaches_with_an_example(name: str) -> None:
    import typer
    from typer.testing import CliRunner

    from ckptguard.cli import build_app

    group = typer.main.get_command(build_app())
    command = group.commands[name]  # type: ignore[attr-defined]
    inner = getattr(command, "commands", None)
    for one in [command] if inner is None else list(inner.values()):
        text = f"{one.help or ''}\n{one.epilog or ''}"
        assert one.help, f"{name} {one.name} has no help"
        assert "ckptguard " in text, f"{name} {one.name} has no example"
    assert CliRunner().invoke(build_app(), [name, "--help"]).exit_code == 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built once without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    code = (
        "import os, sys, shutil\n"
        f"shutil.copytree({str(ROOT)!r}, {str(folder / 'src')!r}, ignore=shutil.ignore_patterns('.venv', '.git', 'build', '*.egg-info', '__pycache__', 'tests', 'shared'))\n"
        f"os.chdir({str(folder / 'src')!r})\n"
        "from setuptools import build_meta\n"
        f"print(build_meta.build_wheel({str(folder)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_every_source_file(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    wanted = {
        p.relative_to(ROOT).as_posix()
        if p.relative_to(ROOT).parts[0] == "ckptguard"
        else f"ckptguard/{p.relative_to(ROOT).as_posix()}"
        for p in sources()
    }
    assert wanted - held == set()
    assert not {n.split("/")[0] for n in held} & set(MAPPED)


def test_the_wheel_holds_what_the_sources_read(wheel: zipfile.ZipFile) -> None:
    data = {
        p
        for top in ("ckptguard", *MAPPED)
        for p in (ROOT / top).rglob("*")
        if p.is_file() and p.suffix not in (".py", ".pyc") and "__pycache__" not in p.parts
    }
    wanted = {
        p.relative_to(ROOT).as_posix()
        if p.relative_to(ROOT).parts[0] == "ckptguard"
        else f"ckptguard/{p.relative_to(ROOT).as_posix()}"
        for p in data
    }
    assert wanted - set(wheel.namelist()) == set()
