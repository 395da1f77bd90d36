from __future__ import annotations

import sys
from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Evidence, FileFacts, Finding, GlobalUse
from ckptguard.ports import Subject

# Libraries whose functions take one text and act on it: the enumeration form is no excuse for them.
KNOWN_LIBRARIES = frozenset(
    [
        "torch",
        "torchvision",
        "torchaudio",
        "numpy",
        "scipy",
        "pandas",
        "transformers",
        "accelerate",
        "peft",
        "trl",
        "datasets",
        "deepspeed",
        "megatron",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "composer",
        "sklearn",
        "joblib",
        "requests",
        "httpx",
        "urllib3",
        "PIL",
        "cv2",
        "yaml",
        "dill",
        "cloudpickle",
        "jax",
        "flax",
        "tensorflow",
        "keras",
        "fsspec",
        "s3fs",
        "boto3",
        "botocore",
        "huggingface_hub",
        "safetensors",
        "wandb",
        "mlflow",
        "ray",
        "pydantic",
        "omegaconf",
        "hydra",
        "IPython",
        "setuptools",
        "pip",
        "pkg_resources",
        "paramiko",
        "fabric",
        "invoke",
        "sh",
        "plumbum",
        "pexpect",
        "asyncssh",
        "django",
        "flask",
    ]
)
# Modules that no checkpoint has a reason to name, called or not: loading imports them and may get at what they hold.
FORBIDDEN_MODULES = frozenset(
    [
        "os",
        "posix",
        "nt",
        "sys",
        "subprocess",
        "runpy",
        "shutil",
        "socket",
        "importlib",
        "webbrowser",
        "ctypes",
        "commands",
        "pty",
        "code",
        "codeop",
        "marshal",
        "timeit",
        "pdb",
        "bdb",
        "cProfile",
        "profile",
        "trace",
        "multiprocessing",
        "concurrent",
        "asyncio",
        "threading",
        "_thread",
        "signal",
    ]
)
FORBIDDEN_NAMES = frozenset(
    f"builtins.{name}" for name in ("eval", "exec", "compile", "open", "__import__", "getattr", "setattr", "delattr", "globals", "locals", "vars", "input", "breakpoint", "apply", "execfile")
) | {"pickle.loads", "pickle.load", "_pickle.loads", "_pickle.load", "torch.load", "types.CodeType", "types.FunctionType", "operator.attrgetter", "operator.methodcaller", "functools.partial", "functools.reduce"}  # fmt: skip
ALLOWED = frozenset({"signal.Signals"})


class PickleSafety:
    """Pickles that would run code.

    Finds: any call of a name that is not on the exact allow-list of what checkpoints need, in every pickle of every file.
    Why it matters: loading such a file runs the sender's code, with the training's credentials.
    Example: an rng_state.pth that calls subprocess, a DCP .metadata that calls os.system.
    What to do: do not load it, with weights_only=False or otherwise; find out who wrote it.
    Blind spots: classes of your own that were merely built are reported as opaque-class: their code is yours to judge.
    """

    name = "pickle-safety"
    needs = Evidence.STRUCTURE
    codes = ("unsafe-pickle", "opaque-class")

    def run(self, subject: Subject) -> Iterator[Finding]:
        for file in subject.facts.files.values():
            unsafe = sorted({use.name for use in file.globals if is_unsafe(use)})
            if unsafe:
                yield finding(
                    "unsafe-pickle",
                    file.name,
                    f"{file.name}: the pickle would call {', '.join(unsafe[:5])}{_more(unsafe)}",
                )
            opaque = sorted({use.name for use in file.globals if is_opaque(use)} - set(unsafe))
            if opaque:
                yield finding(
                    "opaque-class",
                    file.name,
                    f"{file.name} holds objects of {', '.join(opaque[:5])}{_more(opaque)}, which were not built",
                )


def is_unsafe(use: GlobalUse) -> bool:
    """Whether this use of a name would run code that no checkpoint needs."""
    top = use.name.partition(".")[0]
    if use.name in FORBIDDEN_NAMES or (top in FORBIDDEN_MODULES and use.name not in ALLOWED):
        return True
    if use.how == "called":
        return True
    if use.how == "enum":
        return top in sys.stdlib_module_names or top in KNOWN_LIBRARIES or top.startswith("extension code")
    return False


def is_opaque(use: GlobalUse) -> bool:
    return use.how in ("built", "enum") and not is_unsafe(use)


def unsafe_names(file: FileFacts) -> list[str]:
    return sorted({use.name for use in file.globals if is_unsafe(use)})


def _more(names: list[str]) -> str:
    return f" and {len(names) - 5} more" if len(names) > 5 else ""


CHECK = PickleSafety()
