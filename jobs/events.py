"""File events, where the file system has them: they only bring the next look forward, which sees everything anyway."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

SILENT = (
    "nfs",
    "lustre",
    "cifs",
    "smb",
    "fuse",
    "gpfs",
    "beegfs",
    "ceph",
    "9p",
    "afs",
    "glusterfs",
    "virtiofs",
    "wekafs",
)
"""File systems whose changes from other machines raise no event here."""


def speaks(path: Path, mounts: str | None = None) -> bool:
    """Whether the file system of a path tells of changes. `mounts`: the text of /proc/self/mounts."""
    text = (
        Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace") if mounts is None else mounts
    )
    real = str(path.resolve())
    best, kind = "", ""
    for line in text.splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        place = parts[1].replace("\\040", " ")
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, parts[2]
    return not kind.startswith(SILENT)


class _Handler(FileSystemEventHandler):
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def on_any_event(self, event: FileSystemEvent) -> None:
        # Reading is no change, and neither is what the recorder and we write.
        if event.event_type in ("opened", "closed_no_write") or "/.ckptguard" in str(event.src_path):
            return
        self._call()


class Events:
    """Watches directories. Where it cannot, polling goes on as if it were not there."""

    def __init__(self) -> None:
        self._observer: BaseObserver = Observer()
        self._watches: dict[str, tuple[ObservedWatch, tuple[int, int]]] = {}
        self._lock = threading.Lock()
        self._started = False

    def keep(self, path: str, call: Callable[[], None]) -> bool:
        """Make sure that changes below a directory call; a replaced directory is watched anew. Returns whether it works."""
        if "://" in path:
            return False
        with self._lock:
            try:
                mark = _mark(path)
                if mark is None:
                    self._forget(path)
                    return False
                known = self._watches.get(path)
                if known is not None and known[1] == mark:
                    return True
                self._forget(path)
                if not speaks(Path(path)):
                    return False
                if not self._started:
                    self._observer.start()
                    self._started = True
                watch = self._observer.schedule(_Handler(call), path, recursive=True)
            except OSError:
                # Not there, or no watches left (fs.inotify.max_user_watches): polling serves.
                self._forget(path)
                return False
            self._watches[path] = (watch, mark)
            return True

    def stale(self) -> list[str]:
        """Watched directories that were moved, removed or replaced: nobody tells of that."""
        with self._lock:
            known = {path: mark for path, (_, mark) in self._watches.items()}
        return [path for path, mark in known.items() if _mark(path) != mark]

    def _forget(self, path: str) -> None:
        known = self._watches.pop(path, None)
        if known is None:
            return
        try:
            self._observer.unschedule(known[0])
        except (KeyError, OSError):
            return

    def stop(self) -> None:
        if self._started:
            self._observer.stop()
            self._observer.join(timeout=5.0)


def _mark(path: str) -> tuple[int, int] | None:
    """What stays the same as long as it is the same directory; None where there is none."""
    try:
        info = Path(path).stat()
    except OSError:
        return None
    return (info.st_dev, info.st_ino)
