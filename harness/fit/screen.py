"""The answer for people: one screen, what to use in front."""

from __future__ import annotations

from harness.experiment.experiment import Experiment
from harness.fit.answer import Answer
from harness.fit.options import Option
from harness.report.facts.number_words import NumberUnit, human_bytes, in_words

MOST_LINES = 15
HEAD = ("", "", "peak", "step", "costs", "bound by", "batch", "")


def screen(answer: Answer) -> str:
    """Return the answer in at most 15 lines."""
    top = [_use(answer), answer.blocks.words, _step(answer)]
    bottom = [*_proof(answer), *(f"not known: {each}" for each in answer.unknown[:2])]
    if answer.command is not None:
        bottom.append(f"measure: {answer.command}")
    rows = MOST_LINES - len(top) - len(bottom) - 1
    lines = [*top, *_table(answer, rows), *bottom]
    return "\n".join(lines)


def _use(answer: Answer) -> str:
    use, plain = answer.use, answer.plain
    if use is None:
        equal = [each for each in answer.options if each.verdict != "differs"]
        least = min(equal, key=lambda each: each.peak_bytes)
        name = "the plain step" if least.variant == "none" else least.variant
        needed = f"the least is {name} with {human_bytes(least.peak_bytes)}"
        if answer.least_plan_bytes is not None:
            needed += f", the smallest plan of budget has {human_bytes(answer.least_plan_bytes)}"
        would = "; or ".join(answer.remedies)
        return f"NOTHING FITS {answer.subject.hardware.name}: {needed}. What would: {would}"
    if use.variant == "none":
        doubt = "" if plain.verdict == "neutral" else ", unproven"
        return f"USE nothing{doubt}: the plain step fits, {human_bytes(plain.peak_bytes)} at the peak"
    less = 1 - use.peak_bytes / plain.peak_bytes
    what = use.variant if use.title == use.variant else f"{use.variant} ({use.title})"
    file = f"; {use.file}" if use.file else ""
    doubt = "" if use.verdict == "neutral" else ", unproven"
    time = f"{use.slowdown:.2f} \N{MULTIPLICATION SIGN} the step time"
    return f"USE {what}{doubt}: {less:.0%} less peak at {time}{file}"


def _step(answer: Answer) -> str:
    subject = answer.subject
    usable = human_bytes(subject.hardware.usable_bytes)
    limit = f"{human_bytes(subject.limit_bytes)} with a margin of {subject.margin:.0%}"
    sizes = _sizes(subject.experiment, has_batch=subject.has_batch)
    return f"{sizes} on {subject.hardware.name}: {usable} usable, {limit}"


def _sizes(experiment: Experiment, *, has_batch: bool) -> str:
    tokens = f" of {experiment.sequence_length} tokens" if experiment.model.reads_tokens() else ""
    batch = f"batch {experiment.batch_size}{tokens}" if has_batch else "its own batch"
    mesh = "" if experiment.mesh.world_size == 1 else f", {experiment.mesh.label}"
    dtype = "" if experiment.dtype == "own" else f", {experiment.dtype}"
    return f"{batch}{dtype}{mesh}"


def table_of(answer: Answer) -> tuple[list[tuple[str, ...]], int | None]:
    """Return the cells of all options under `HEAD`, the fastest first, and the number of the answer."""
    ordered = sorted(answer.options, key=lambda each: each.step_time_s)
    used = None if answer.use is None else ordered.index(answer.use)
    return [_row(answer, each) for each in ordered], used


def _table(answer: Answer, most: int) -> list[str]:
    """Return the options as a table, the fastest first; those that do not fit are marked."""
    ordered = sorted(answer.options, key=lambda each: each.step_time_s)
    if len(ordered) > most:
        kept = [each for each in ordered if each is answer.use or each.variant in ("none", "full")]
        others = [each for each in ordered if each not in kept]
        ordered = [each for each in ordered if each in (*kept, *others[: max(0, most - len(kept))])]
    rows = [HEAD, *(_row(answer, each) for each in ordered)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return [
        "  ".join(
            cell.ljust(width) if column in (0, 1, 5, 7) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(answer: Answer, option: Option) -> tuple[str, ...]:
    mark = "USE" if option is answer.use else ("" if option.fits else "--")
    batch = "" if option.largest_batch is None else f"\N{LESS-THAN OR EQUAL TO} {option.largest_batch}"
    return (
        mark,
        option.title if option.variant.startswith(("first_", "rules")) else option.variant,
        human_bytes(option.peak_bytes),
        in_words(option.step_time_s, NumberUnit.SECONDS),
        "" if option.variant == "none" else f"{option.slowdown - 1:+.1%}",
        option.bound_by,
        batch,
        _file(option),
    )


def _file(option: Option) -> str:
    """Return where an option is, or why it is nowhere, and that it was not proven."""
    if option.verdict == "differs":
        return "differs"
    where = option.file or ("needs acbench" if option.needs_acbench else "")
    return ", ".join(each for each in (where, "unproven" * (option.verdict == "unverified")) if each)


def _proof(answer: Answer) -> list[str]:
    use = answer.use
    if use is None or use.proof is None:
        return []
    how = "bit for bit" if use.proof.level == "bitwise" else "within its declared tolerance"
    trained = f"one step of {use.proof.batch_size} samples, {use.proof.words}"
    return [f"proven here: {use.variant} is neutral, {how} ({trained})"]
