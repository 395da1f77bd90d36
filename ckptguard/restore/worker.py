"""The child process: one trial. Started as `python -m ckptguard.restore.worker ORDER EVENTS`; the only importer of torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import ckptguard
from ckptguard.errors import MissingExtra, RecipeError, UsageError
from ckptguard.restore import plain, recipes
from ckptguard.restore.held import Refused, rank
from ckptguard.restore.loading import LoadRaised, Misfit
from ckptguard.restore.model import Fault, Order
from ckptguard.restore.session import Session, Stop, tail_of

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main(arguments: list[str]) -> int:
    order_file, events = arguments
    if rank() > 0:
        events = os.devnull  # the first process speaks for all
    _die_with_parent()
    order = Order(**json.loads(Path(order_file).read_text(encoding="utf-8")))
    status = perform(order, Path(events))
    # The user's threads and finalizers have no say in when this process ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def perform(order: Order, events: Path) -> int:
    """Run one trial in this process and report it to `events`. Returns the exit status: 1 where a fault was reported."""
    session: Session | None = None
    try:
        session = Session(order, events)
        with contextlib.suppress(Stop):
            _trial(session)
        session.done()
    except BaseException as error:  # noqa: BLE001  everything that the user's code can do is reported
        _report(events, _fault_of(error))
        return 1
    finally:
        if session is not None:
            session.close()
    return 0


def _trial(session: Session) -> None:
    """Find the recipe, prepare the process like the recorded one, and run the trial of its kind."""
    order = session.order
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("torch", "torch", "restoring with a recipe") from None

    if order.threads:
        torch.set_num_threads(order.threads)
    found = recipes.find_recipe(order.recipe, lambda module: _redirected(module, order.scratch))
    device = order.device
    if device == "auto":
        local = os.environ.get("LOCAL_RANK") if order.processes > 1 else None
        cuda = "cuda" if local is None else f"cuda:{local}"
        device = cuda if torch.cuda.is_available() else "cpu"
    else:
        _there_is(device)
    if found.kind == "trainer":
        from ckptguard.restore import trainer

        trainer.run(session, found.recipe, device)
    elif found.kind == "lightning":
        from ckptguard.restore import lightning

        lightning.run(session, found.recipe, device)
    else:
        plain.run(session, found.recipe, device)


def _there_is(device: str) -> None:
    """Raise UsageError for a device that torch does not see: no recipe is to blame for it."""
    import torch

    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        raise UsageError(f"--device {device}: no such kind of device", "auto, cpu, cuda or cuda:N") from None
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise UsageError(
            f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices here",
            "--device cpu, or leave it out",
        )


def _redirected(module: ModuleType, scratch: str) -> AbstractContextManager[None]:
    """A Trainer must not touch its real output directory while it is made; no library is imported only for that."""
    source = Path(getattr(module, "__file__", None) or "")
    speaks = source.suffix == ".py" and "transformers" in source.read_text(encoding="utf-8", errors="replace")
    if "transformers" not in sys.modules and not speaks:
        return contextlib.nullcontext()
    from ckptguard.restore import trainer

    return trainer.redirected(scratch)


def _fault_of(error: BaseException) -> Fault:
    detail = tail_of(error)
    if isinstance(error, Misfit):
        return Fault("misfit", error.message, error.hint, detail)
    if isinstance(error, LoadRaised):
        return Fault("load", f"{error.message}{_place_in_user_code(error.__cause__ or error)}", "", detail)
    if isinstance(error, Refused):
        return Fault("restore", error.message, error.hint, detail)
    if isinstance(error, RecipeError):
        # Where in our code that was noticed helps nobody.
        return Fault("recipe", error.message, error.hint)
    if isinstance(error, MissingExtra):
        return Fault("extra", error.message, error.hint)
    if isinstance(error, UsageError):
        return Fault("usage", error.message, error.hint)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Fault("memory", f"the child process ran out of memory: {error}", detail=detail)
    if _is_ours(error):
        return Fault("internal", f"{type(error).__name__}: {error}", detail=detail)
    where = _place_in_user_code(error)
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return Fault("recipe", f"the recipe raised {said}{where}", detail=detail)


_OURS = str(Path(ckptguard.__file__).parent)


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised by a line of ours: then nobody's recipe is to blame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS)


def _place_in_user_code(error: BaseException) -> str:
    """The last line of a file that belongs to no library."""
    place = ""
    trace: Any = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "site-packages" not in name and not name.startswith((_OURS, "<")):
            place = f" ({Path(name).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place


def _report(events: Path, fault: Fault) -> None:
    with events.open("a", encoding="utf-8") as file:
        values = {"event": "fault", "kind": fault.kind, "message": fault.message, "hint": fault.hint}
        file.write(json.dumps({**values, "detail": fault.detail}) + "\n")


def _die_with_parent() -> None:
    """A parent that is killed cannot end its child: ask the kernel to. A kernel killed for memory takes us first."""
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text("1000")
    except (OSError, AttributeError):
        pass  # not Linux


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
