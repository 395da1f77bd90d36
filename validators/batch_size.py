from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Effect, Evidence, Finding, Severity
from ckptguard.ports import Subject


class BatchSize:
    """Whether the Trainer's saved batch size is the one that its arguments ask for.

    Finds: a batch size in the trainer's state that is no whole number of devices times that of the training arguments.
    Why it matters: a resume takes the saved one: another global batch, another number of steps left, other data skipped.
    Example: a run that was tried with a batch of 1, and resumed with the arguments of the real one.
    What to do: compare batch size, accumulation and devices of both before the resume; set train_batch_size where it is wrong.
    Blind spots: both changed alike; libraries that adjust the batch size themselves are told from faults by no one.
    """

    name = "batch-size"
    needs = Evidence.STRUCTURE
    codes = ("config-mismatch",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        attributes = subject.facts.state.attributes
        saved, asked = attributes.get("batch_size"), attributes.get("configured_batch_size")
        if isinstance(saved, int) and isinstance(asked, int) and asked > 0 and saved % asked:
            yield finding(
                "config-mismatch",
                "trainer_state.json",
                f"trainer_state.json has a batch size of {saved}, training_args.bin asks for {asked} a device: the Trainer goes on with {saved}",
                "compare batch size x accumulation x devices of both before the resume",
                severity=Severity.WARNING,
                effect=Effect.NONE,
            )


CHECK = BatchSize()
