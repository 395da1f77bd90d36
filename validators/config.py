from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import Effect, Evidence, Finding, Severity, Tensor
from ckptguard.ports import Subject
from ckptguard.validators._base import EMBEDDING, comparable

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "olmo",
    "olmo2",
    "starcoder2",
    "stablelm",
    "smollm3",
)
ENCODERS = ("bert", "roberta", "electra")
INDIFFERENT = frozenset(
    {
        "transformers_version",
        "_name_or_path",
        "use_cache",
        "torch_dtype",
        "dtype",
        "_attn_implementation",
        "attn_implementation",
        "architectures",
        "auto_map",
    }
)


class Config:
    """Whether config.json fits the weights, and the other checkpoints of the run.

    Finds: another hidden size, vocabulary, number of layers, width of the feed-forward matrices or of the keys, or number
    of positions than the weights have; a setting that changed within the
    run; an output head or embedding that is neither stored nor tied.
    Why it matters: a changed normalisation constant or position base loads without a word and shifts every activation.
    Example: a config.json that was edited for an export and copied back.
    What to do: put back the config of the checkpoint before.
    Blind spots: settings that leave no trace in the weights, in a run with a single checkpoint. Rows padded beyond the
    vocabulary are normal.
    """

    name = "config"
    needs = Evidence.STRUCTURE
    codes = ("config-mismatch", "missing-tensor")

    def run(self, subject: Subject) -> Iterator[Finding]:
        facts = subject.facts
        config = facts.state.config
        if config is None:
            return
        yield from self._weights(facts.state.config_subject, config, facts.state.model)
        yield from self._siblings(subject, config)

    @staticmethod
    def _weights(where: str, config: Mapping[str, Any], model: Mapping[str, Tensor]) -> Iterator[Finding]:
        if (
            not model
            or config.get("is_encoder_decoder")
            or "text_config" in config
            or "vision_config" in config
        ):
            return
        layers = {int(m.group(1)) for n in model if (m := LAYER.search(n))}
        said = _first(config, LAYERS)
        if said is not None and layers and len(layers) != said:
            code = "missing-tensor" if len(layers) < said else "config-mismatch"
            yield finding(
                "config-mismatch", where, f"the config says {said} layers, the weights have {len(layers)}"
            )
            if code == "missing-tensor" and layers != set(range(len(layers))):
                lost = sorted(set(range(said)) - layers)
                yield finding("missing-tensor", where, f"the layers {lost[:10]} are not in the weights")
        embedding = next(
            (t for n, t in model.items() if EMBEDDING.search(n) and len(t.shape) == 2 and t.numel), None
        )
        hidden, vocabulary = _first(config, HIDDEN), config.get("vocab_size")
        if embedding is not None:
            rows, width = embedding.shape
            if isinstance(vocabulary, int) and rows < vocabulary:
                yield finding(
                    "config-mismatch",
                    where,
                    f"the config says a vocabulary of {vocabulary}, the embedding has {rows} rows",
                )
            if (
                hidden is not None
                and width != hidden
                and "embedding_size" not in config
                and "word_embed_proj_dim" not in config
            ):
                yield finding(
                    "config-mismatch",
                    where,
                    f"the config says a hidden size of {hidden}, the embedding has {width} columns",
                )
        yield from _tied(where, config, model, embedding)
        yield from _widths(where, config, model)

    @staticmethod
    def _siblings(subject: Subject, config: Mapping[str, Any]) -> Iterator[Finding]:
        before = subject.previous
        if before is None or before.state.config is None or before not in comparable(subject):
            return
        theirs = before.state.config
        changed = [k for k in sorted({*config, *theirs} - INDIFFERENT) if config.get(k) != theirs.get(k)]
        if changed:
            words = ", ".join(
                f"{k}: {_short(theirs.get(k))} became {_short(config.get(k))}" for k in changed[:4]
            )
            yield finding(
                "config-mismatch",
                subject.facts.state.config_subject,
                f"the config is not that of {before.path}: {words}",
                severity=Severity.WARNING,
                effect=Effect.LOSSY,
            )


def _tied(
    where: str, config: Mapping[str, Any], model: Mapping[str, Tensor], embedding: Tensor | None
) -> Iterator[Finding]:
    tied = config.get("tie_word_embeddings")
    head = next((n for n in model if HEAD.search(n)), None)
    named_embedding = any(EMBEDDING.search(n) for n in model)
    causal = any("CausalLM" in str(a) or "LMHead" in str(a) for a in config.get("architectures") or ())
    if not causal:
        return
    if tied is True and not named_embedding and head is None:
        yield finding(
            "missing-tensor", where, "embedding and output head are tied, and neither is in the weights"
        )
    elif tied is True and not named_embedding and any(LAYER.search(n) for n in model):
        yield finding(
            "missing-tensor",
            where,
            f"embedding and output head are tied; only {head} is stored, and loaders tie from the embedding",
            severity=Severity.WARNING,
            effect=Effect.LOSSY,
        )
    elif tied is False and named_embedding and head is None and embedding is not None:
        yield finding(
            "missing-tensor",
            where,
            "the output head is not tied to the embedding, and it is not in the weights",
        )


def _widths(where: str, config: Mapping[str, Any], model: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Widths that the config of a plain decoder or encoder states, against the matrices that have them."""
    family = config.get("model_type")
    if family not in (*DECODERS, *ENCODERS, "gpt2"):
        return
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    # What a config leaves out is its family's default, which is known here for few.
    groups = config.get("num_key_value_heads", heads if family == "llama" else None)
    size = config.get("head_dim")
    if (
        size is None
        and family in ("llama", "mistral", "qwen2")
        and isinstance(heads, int)
        and isinstance(hidden, int)
        and heads
        and not hidden % heads
    ):
        size = hidden // heads
    keys = groups * size if isinstance(groups, int) and isinstance(size, int) else None
    stated: list[tuple[str, object, str]] = []
    if family in DECODERS:
        stated += [
            ("an intermediate size", config.get("intermediate_size"), r"\.mlp\.up_proj\.weight$"),
            (f"{groups} key heads of {size}, so a width", keys, r"\.self_attn\.k_proj\.weight$"),
        ]
    elif family in ENCODERS:
        stated += [
            ("an intermediate size", config.get("intermediate_size"), r"\.intermediate\.dense\.weight$"),
            (
                "a number of positions",
                config.get("max_position_embeddings"),
                r"\.position_embeddings\.weight$",
            ),
        ]
    else:
        stated.append(("a number of positions", config.get("n_positions"), r"(?:^|\.)wpe\.weight$"))
    for what, number, pattern in stated:
        rows = {
            t.shape[0]
            for n, t in model.items()
            if re.search(pattern, n) and len(t.shape) == 2 and t.dtype.startswith(("float", "bfloat"))
        }
        if len(rows) == 1 and isinstance(number, int) and number not in rows:
            yield finding(
                "config-mismatch", where, f"the config says {what} of {number}, the weights have {min(rows)}"
            )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((v for n in names if isinstance(v := config.get(n), int) and not isinstance(v, bool)), None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


CHECK = Config()
