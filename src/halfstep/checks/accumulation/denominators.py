"""Denominators of a group: one law, that every supervised element has the same coefficient and all add up to one.

Which rule is told follows from the pattern of the deviation. A group is judged only where it is a plain accumulation:
contributions that came by the same lines, each from a forward of its own. Losses at other lines, several losses on
one forward, recurrent chunks and gradients set by hand are other things.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from halfstep.checks.accumulation.evidence import Evidence, recall
from halfstep.checks.accumulation.sizes import Sizes
from halfstep.checks.accumulation.weights import Strand, Term, even, is_driven, near, strands
from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import (
    Contribution,
    Division,
    Event,
    Finding,
    GradientsEdited,
    GradientsTaken,
    GroupMade,
    ModuleCalled,
    ModuleSeen,
    OrderPassed,
)

_REMEMBERED = 1024  # contributions whose fate or origin is remembered
_SLIGHT, _CLEAR = 0.05, 0.2  # relative deviation of an element's coefficient: worth a word, worth a warning
_HABIT = 0.25  # share of groups below which a ragged micro-batch is the loader's last one


class Denominators(BaseCheck):
    rules = (
        "loss-not-divided",
        "loss-divided-twice",
        "mean-of-means",
        "partial-group-underweighted",
        "leftover-micro-batches",
        "optimizer-step-every-micro-batch",
    )

    def __init__(self) -> None:
        self._forwards = 0
        self._carried = False
        self._taken = False
        self._plain_modules: set[int] = set()  # without parameters: losses, activations
        self._origin: dict[int, tuple[int, bool, bool]] = {}  # contribution -> forwards before it, carried, taken
        self._order: deque[int] = deque()
        self._judged: dict[tuple[int, int], bool] = {}  # first and last contribution of a group
        self._habits: dict[tuple[int, int], _Habit] = {}
        self._attempted: dict[int, set[int]] = {}  # optimizer -> routes of its updates
        self._passes: deque[int] = deque(maxlen=8)  # contributions begun when a loader had run through
        self._ranks = 1

    # -- what came before each contribution ----------------------------------------------------------------------

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case ModuleSeen(parameters=0):
                self._plain_modules.add(event.module)
            case ModuleCalled(grad_enabled=True) if event.module not in self._plain_modules:
                if not event.type.endswith("Loss"):
                    self._forwards += 1
                    self._carried |= event.carried
            case GradientsTaken(create_graph=True):
                self._taken = True
            case OrderPassed(whole=True):
                self._passes.append(event.micro)
            case GroupMade():
                self._ranks = event.world_size
            case Contribution():
                self._origin[event.number] = (self._forwards, self._carried, self._taken or event.create_graph)
                self._order.append(event.number)
                if len(self._order) > _REMEMBERED:
                    self._origin.pop(self._order.popleft(), None)
                self._forwards, self._carried, self._taken = 0, False, False
            case _:
                pass
        return ()

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        live = update.live
        optimizer = story.optimizer(update.optimizer)
        if not live or update.stale or optimizer.is_idle or is_driven(update, optimizer.made):
            return
        if not update.attempt.managed and any(c.undivided for c in live):
            return  # stepped by hand before the engine divided: another rule's
        found = strands(update)
        routes = {s.last.route for s in found}
        recall(self._attempted, update.optimizer, set).update(routes)
        if any(c.route in routes for c in update.erased):
            return  # part of this group was cleared: another rule's
        for strand in found:
            first, last = strand.contributions[0].number, strand.last.number
            if (first, last) in self._judged:
                continue  # a second optimizer on the same contributions
            recall(self._judged, (first, last), lambda: True)
            if self._ranks > 1 and _is_share_of_ranks(strand, self._ranks):
                continue  # whether that is right, only all ranks together show
            way = (update.optimizer, strand.last.route)
            habit = recall(self._habits, way, lambda: _Habit(update.optimizer))
            habit.sizes.note(update, strand, any(first <= begun < last for begun in self._passes))
            yield from habit.judge(update, strand, alone=len(found) == 1, plain=self._is_plain(strand, update))

    def end(self, story: Story) -> Iterable[Finding]:
        for habit in self._habits.values():
            others = {
                ident
                for ident, routes in self._attempted.items()
                if ident != habit.optimizer and not routes & self._attempted.get(habit.optimizer, set())
            }
            if not story.optimizer(habit.optimizer).is_idle:
                yield from habit.end(rivals=bool(others))

    def _is_plain(self, strand: Strand, update: Update) -> bool:
        """An accumulation over micro-batches, as far as can be seen."""
        origins = [self._origin.get(c.number, (0, False, False)) for c in strand.contributions]
        if any(carried or taken for _, carried, taken in origins):
            return False
        kept = [c.retain_graph for c in strand.contributions]
        shared = any(keeps and forwards == 0 for keeps, (forwards, _, _) in zip(kept, origins[1:], strict=False))
        modules = any(forwards for forwards, _, _ in origins)
        unseen = modules and any(forwards == 0 for forwards, _, _ in origins[1:])
        return not shared and not unseen and strand.same_parameters(update.optimizer)


class _Habit:
    """What the groups of one optimizer, from one line, have been like so far."""

    def __init__(self, optimizer: int) -> None:
        self.optimizer = optimizer
        self._undivided = Evidence(least=6, share=0.8)
        self._twice = Evidence(least=2, share=0.5)
        self._means = Evidence(least=3, share=_HABIT, weight="deviation")
        self._ragged = Evidence(least=3, share=0.6, weight="deviation")  # the last micro-batch of a group is smaller
        self._stepped = Evidence(least=6, share=0.9)
        self.sizes = Sizes()
        self._singles = 0
        self._edits = False  # gradients of some group were edited by hand

    def judge(self, update: Update, strand: Strand, alone: bool, plain: bool) -> Iterator[Finding]:
        main, edited = strand.main, any(isinstance(event, GradientsEdited) for event in update.between)
        unseen = self._edits and not edited  # what was edited when it was looked at is so when it is not
        self._edits |= edited
        if main is None or not plain or strand.edited or unseen or not strand.weighed:
            self.sizes.unjudged()
            return
        size, parts = strand.size, main.parts()
        self._undivided.chance()
        self._twice.chance()
        if size > 1:
            for term in strand.terms:
                self._mean_of_means(update, strand, term)
            self._sums(update, strand, main, parts, alone)
        self._single(update, strand, main, parts, alone)
        self.sizes.judge(update, strand, main, parts)
        for evidence in (self._twice, self._means, self._ragged, self._stepped):
            yield from evidence.firm()
        yield from self.sizes.firm(self._all_means)

    @property
    def _all_means(self) -> bool:
        """Most groups are means of means: dividing by elements cures the short ones too."""
        return 2 * self._means.seen > self._means.chances

    def end(self, rivals: bool) -> Iterator[Finding]:
        if not rivals:  # two losses in turn, each with an optimizer of its own: real and fake, not micro-batches
            yield from self._undivided.rest()
        for evidence in (self._twice, self._means, self._ragged):
            yield from evidence.rest()
        if self._singles >= 2:
            yield from self._stepped.rest()
        yield from self.sizes.rest(self._all_means)

    # -- what the coefficients add up to -------------------------------------------------------------------------

    def _sums(self, update: Update, strand: Strand, main: Term, parts: int | None, alone: bool) -> None:
        size, total = strand.size, main.total
        means = all(w.share.reduction == "mean" or w.elements > 1 for w in main.weights)
        if parts == 1 and means and alone and _all_whole(strand):
            self._undivided.add(
                Finding(
                    rule="loss-not-divided",
                    severity="warning",
                    at=strand.last.at,
                    update=update.number,
                    message=(
                        f"{size} mean losses were added up without a division: the group's coefficients add up to "
                        f"{total:g}, its gradient is {size} times that of the whole batch"
                    ),
                    evidence={"micro_batches": size, "sum_of_coefficients": total, "loss": main.loss},
                    fix=f"(loss / {size}).backward(), or divide summed losses by the group's supervised elements",
                )
            )
        self._divided_twice(update, strand, main)

    def _divided_twice(self, update: Update, strand: Strand, main: Term) -> None:
        size, total, at = strand.size, main.total, strand.last.at
        if not near(total * size, 1.0, main.close):
            return
        divisions = strand.divisions()
        by_size = [d for d in divisions if near(d.by, size)]
        edits = [e for e in update.between if isinstance(e, GradientsEdited) and near(e.factor or 0.0, 1 / size)]
        ragged = not even([w.elements for w in main.weights], 0.02) and even([w.each for w in main.weights], 0.01)
        plain = [d for d in by_size if not d.multiplied or size > 2]  # 0.5 is a weight as well
        elements = main.weights[-1].elements
        if by_size and elements > 1 and even([w.elements for w in main.weights]):  # a sum over (elements * size)
            plain += [d for d in divisions if near(d.by, elements * size)]
        if len(plain) + len(edits) > 1 and not (size == 2 and main.is_square):
            place = edits[0].at if edits else by_size[-1].at
        elif by_size and ragged:
            place = by_size[-1].at
        else:
            return
        outer = by_size[0].at
        tool = outer is not None and outer == at and place != outer
        self._twice.add(
            Finding(
                rule="loss-divided-twice",
                severity="error",
                at=place or at,
                update=update.number,
                message=(
                    f"the loss of each of {size} micro-batches was divided by {size} twice"
                    + (f" (again by the call at line {at.line})" if tool and at else "")
                    + f": the coefficients add up to {total:.4g}, the gradient is {size} times too small"
                ),
                evidence={
                    "micro_batches": size,
                    "sum_of_coefficients": total,
                    "divided_by": [d.by for d in divisions],
                },
                fix="leave the division to one of the two: drop the script's own `/ accumulation_steps`",
            )
        )

    def _mean_of_means(self, update: Update, strand: Strand, term: Term) -> None:
        if not term.known or any(not w.elements for w in term.weights) or not term.total:
            return
        self._means.chance()
        self._ragged.chance()
        deviation = term.deviation
        if not term.alike or not deviation > _SLIGHT or term.uneven_inside:
            return
        counts = [w.elements for w in term.weights]
        low, high = min(counts), max(counts)
        last_only = term.weights[-1].elements == low and even(counts[:-1], 0.01)
        contribution = strand.last
        (self._ragged if last_only else self._means).add(
            Finding(
                rule="mean-of-means",
                severity="error" if deviation > _CLEAR and not last_only else "warning",
                at=contribution.loss_at or contribution.at,
                update=update.number,
                message=(
                    f"micro-batches of one group hold {low:g} to {high:g} supervised elements, yet each has the same "
                    f"weight {term.weights[0].total:.4g}: an element of the smallest counts {high / low:.3g} times "
                    "as much as one of the largest"
                ),
                evidence={
                    "elements": counts[:32],
                    "weights": [w.total for w in term.weights[:32]],
                    "deviation": deviation,
                    "loss": term.loss,
                },
                fix="sum the losses of each micro-batch and divide by the number of supervised elements of the group",
            )
        )

    def _single(self, update: Update, strand: Strand, main: Term, parts: int | None, alone: bool) -> None:
        """Every contribution stepped at once, though its loss was divided for a group."""
        self._stepped.chance()
        if strand.size != 1 or parts is None or parts < 2 or not alone or self.sizes.whole:
            return
        if not any(near(d.by, parts) and d.counts is not False and _is_meant(d) for d in strand.last.divisions):
            return
        if len(strand.terms) == 1:
            weighed = parts == 2 and main.is_square  # half a square
        else:
            weighed = parts == 2 or near(sum(t.total for t in strand.terms), 1.0, 0.02)  # a mean over terms
        if weighed:
            return
        self._singles += 1
        self._stepped.add(
            Finding(
                rule="optimizer-step-every-micro-batch",
                severity="error",
                at=update.attempt.at,
                update=update.number,
                message=(
                    f"the loss is divided by {parts} for a group of {parts} micro-batches, yet every one of them was "
                    f"stepped at once: each update sees 1/{parts} of one micro-batch's gradient"
                ),
                evidence={"micro_batches": 1, "divided_by": parts},
                fix=f"if (i + 1) % {parts} == 0: optimizer.step(); optimizer.zero_grad()",
            )
        )


def _is_meant(division: Division) -> bool:
    """Whether this may be a division for a group: a product with 0.25 is a weight, with 1 / A it is none."""
    return not division.multiplied or bool(division.counts)


def _all_whole(strand: Strand) -> bool:
    return all(t.known for t in strand.terms)


def _is_share_of_ranks(strand: Strand, ranks: int) -> bool:
    """Whether the group's loss was divided by the number of ranks."""
    main = strand.main
    if main is None or not near(main.total * ranks, 1.0, main.close):
        return False
    return any(near(d.by, ranks) or near(d.by, ranks * strand.size) for d in strand.divisions())
