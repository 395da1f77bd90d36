"""What Hugging Face directories share: weight files with or without an index, config, tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._state import Builder, is_weights
from ckptguard.model import Directory, FileFacts, Manifest, ManifestFile, Role, Tensor

SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.(?P<ending>safetensors|bin)$")
WEIGHTS = re.compile(
    r"^(model|pytorch_model|adapter_model|diffusion_pytorch_model)(\.[A-Za-z0-9_-]+)?\.(safetensors|bin)$"
)
INDEX = re.compile(r"^.+\.(safetensors|bin)\.index(\.[\w-]+)?\.json$")
CONFIGS = ("config.json", "adapter_config.json")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
    "preprocessor_config.json",
)


def weight_files(directory: Directory, base: str = "") -> Iterator[ManifestFile]:
    """Weights, indexes, configs and tokenizer files that lie directly in a directory. `base` is the checkpoint's path."""
    for name, entry in sorted(directory.files.items()):
        inside = entry.key[len(base) + 1 if base else 0 :]
        if INDEX.match(name):
            yield ManifestFile(inside, entry, Role.INDEX, "json")
        elif WEIGHTS.match(name) or SHARD.match(name):
            yield ManifestFile(
                inside, entry, Role.MODEL, "safetensors" if name.endswith("safetensors") else "torch"
            )
        elif name in CONFIGS:
            yield ManifestFile(inside, entry, Role.CONFIG, "json")
        elif name == "generation_config.json":
            yield ManifestFile(inside, entry, Role.OTHER, "json")
        elif name in TOKENIZERS:
            yield ManifestFile(inside, entry, Role.TOKENIZER, "json" if name.endswith(".json") else "opaque")


def has_weights(directory: Directory) -> bool:
    return any(WEIGHTS.match(n) or SHARD.match(n) or INDEX.match(n) for n in directory.files)


def add_weights(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """The model from weight files: by the index where there is one (stale shards beside it do not count)."""
    index = next((f for f in manifest.by_role(Role.INDEX) if isinstance(_tree(files, f.name), dict)), None)
    mapped = as_object(as_object(_tree(files, index.name)).get("weight_map")) if index else {}
    folder = index.name.rpartition("/")[0] if index else ""
    wanted = {f"{folder}/{f}" if folder else str(f) for f in mapped.values()}
    for file in manifest.by_role(Role.MODEL):
        tree = _tree(files, file.name)
        if isinstance(tree, dict) and "model" in tree and is_weights(tree["model"]):
            tree = tree["model"]
        if not isinstance(tree, dict):
            continue
        if mapped and file.name not in wanted:
            continue
        builder.add_model({str(k): v for k, v in tree.items() if isinstance(v, Tensor)}, file.name)


def add_config(builder: Builder, files: Mapping[str, FileFacts], prefix: str = "") -> None:
    config = _tree(files, f"{prefix}config.json")
    if isinstance(config, dict):
        builder.config = config
        builder.config_subject = f"{prefix}config.json"
    adapter = _tree(files, f"{prefix}adapter_config.json")
    if isinstance(adapter, dict):
        builder.attributes["adapter"] = adapter
        builder.components["config"] = True
    if f"{prefix}config.json" in files or f"{prefix}adapter_config.json" in files:
        builder.components.setdefault("config", True)


def add_tokenizer(builder: Builder, files: Mapping[str, FileFacts], prefix: str = "") -> None:
    """How many ids the tokenizer can give: the highest id plus one."""
    tokenizer = _tree(files, f"{prefix}tokenizer.json")
    if not isinstance(tokenizer, dict):
        return
    highest = max(_token_ids(tokenizer), default=-1)
    if highest >= 0:
        builder.tokenizer_size = highest + 1
        builder.tokenizer_subject = f"{prefix}tokenizer.json"
        builder.attributes["tokenizer_vocabulary"] = _vocabulary(tokenizer)


def _vocabulary(tokenizer: Mapping[str, Any]) -> int:
    """A number that differs where the vocabularies differ."""
    vocab = as_object(tokenizer.get("model")).get("vocab")
    return (
        hash(tuple(sorted(vocab.items())))
        if isinstance(vocab, dict) and all(isinstance(v, int) for v in vocab.values())
        else 0
    )


def _token_ids(tokenizer: Mapping[str, Any]) -> Iterator[int]:
    vocab = as_object(tokenizer.get("model")).get("vocab")
    if isinstance(vocab, dict):
        yield from (i for i in vocab.values() if isinstance(i, int))
    elif isinstance(vocab, list):
        yield len(vocab) - 1
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            yield token["id"]


def _tree(files: Mapping[str, FileFacts], name: str) -> Any:
    facts = files.get(name)
    return facts.tree if facts is not None else None
