"""The order the verbs are held to: what may follow what, and what was done in between by hand."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from halfstep.engine.account import Account
from halfstep.engine.binding import Binding
from halfstep.engine.contribute import Contributor
from halfstep.engine.group import Group
from halfstep.engine.island import Islands
from halfstep.engine.journal import Journal
from halfstep.engine.ledger import Share
from halfstep.engine.position import Position
from halfstep.engine.precision import HALVES, Precision
from halfstep.engine.replicas.rows import Closing
from halfstep.engine.verification import Verification
from halfstep.engine.witness import Witnesses
from halfstep.errors import GroupError, MisuseError, UnsupportedError, counted


class Order:
    """Knows the open group and the pending contributions of one manager; refuses verbs out of place.

    Nothing here changes parameters, optimizers or the loss scale.
    """

    def __init__(self, contributor: Contributor, position: Position, account: Account, journal: Journal) -> None:
        self.contributor = contributor
        self.ledger = contributor.ledger
        self.position = position
        self.account = account
        self.journal = journal
        self.witnesses = Witnesses()
        self.group: Group[Any] | None = None
        self.told = False
        """Whether the first update has been looked at: did anything run in the precision that was declared?"""
        self.unproven: list[tuple[nn.Module, Islands]] = []
        """Islands whose forward has not been seen to run yet."""

    def stepped_by_hand(self, optimizer: str) -> None:
        """An optimizer this manager steps was stepped by somebody else."""
        self.witnesses.stepped(len(self.ledger.pending), optimizer)

    # --- backward ---

    def look(self) -> None:
        """Before a backward: raise what was done by hand since the last verb."""
        witnesses = self.witnesses
        witnesses.before(self.ledger.waits)
        if witnesses.fault is not None:
            self._refuse(*witnesses.fault)

    def _refuse(self, seen: str, fix: str) -> NoReturn:
        raise MisuseError(seen, f"{fix}; manager.discard() drops what is pending")

    def contributed(self, empty: bool) -> None:
        """A backward of the manager's own has run."""
        if self.group is not None:
            self.group.contributed = True
        if empty and not self.witnesses:
            return
        if self.witnesses:
            self.witnesses.after()
        else:
            self.witnesses.first(self.contributor.leaves)

    # --- step ---

    def share(self, binding: Binding) -> Share:
        """The pending contributions of this optimizer; refuses an unfinished group and a step without backward."""
        group = self.group
        if group is not None and not group.whole:
            raise GroupError(
                f"step was called with {group.progress()} of group {group.index + 1} contributed: it would be divided "
                "by the weight of all of them",
                "let the loop over the group end before manager.step; after a break, manager.discard() drops the group",
            )
        share = self.ledger.share(binding.ids, None if group is None else group.weights)
        if group is not None and not group.own and not share:
            return group.nothing()  # a replica that ran dry: it takes part, with nothing of its own
        if not share:
            if self.ledger.pending:
                count = len(self.ledger.pending)
                raise MisuseError(
                    f"none of the {count} pending contributions reached a parameter of this model"
                    if count > 1
                    else "the one pending contribution has not reached a parameter of this model",
                    "step the model whose loss was given to backward",
                )
            raise MisuseError(
                "step was called without a backward since the last one: there is nothing to update with",
                "manager.backward(loss) first; in a flat loop, step only if manager.pending",
            )
        return share

    def close(self, binding: Binding, share: Share) -> Closing:
        """What is pending on all replicas. A collective where W was not known before the group."""
        replicas, group = self.contributor.replicas, self.group
        apart = bool(self.contributor.buffers)
        if apart and replicas.sharded:
            raise UnsupportedError(
                "several terms whose weights come with backward, on sharded parameters: their gradients are reduced in "
                "backward, before the weights are known",
                "give the weights ahead: manager.groups(loader, size, weight=…)",
            )
        opening = None if group is None else group.opening
        if opening is not None and opening.weights is not None:
            local = group is None or group.apart
            if not local and not apart and not replicas.exchanged(binding.modules):
                raise MisuseError(
                    "the gradients of this group have not been exchanged: the last forward that was supervised did not "
                    "go through the wrapped model",
                    "model(x) in every micro-batch, not model.module(x)",
                )
            closing = Closing(opening.weights, not any(opening.weights), local or apart)
        else:
            closing = replicas.close(
                share.mode,
                len(share),
                None if share.weights is None else [float(w) for w in share.weights],
                empty=share.empty,
                local=apart or (group is not None and group.apart) or not replicas.exchanged(binding.modules),
                guessed=self.contributor.counted_examples is not None,
            )
        return closing if opening is None else replace(closing, examples=opening.examples)

    def require_intact(self, binding: Binding, share: Share) -> None:
        """Raise what was noticed of verbs called by hand since the last update."""
        witnesses = self.witnesses
        witnesses.before(self.ledger.waits)
        witnesses.require_unstepped(binding.optimizers, len(self.ledger.pending))
        if witnesses.fault is not None:
            self._refuse(*witnesses.fault)
        if witnesses.edited(binding.ids):
            self._edited(share)

    def _edited(self, share: Share) -> None:
        """Gradients were changed in place by hand: harmless where they are the real ones, else refused."""
        scale = self.contributor.scale.value
        carried = [f"the loss scale {scale:g}"] * (scale != 1.0)
        if share.mode == "along" and share.weights is not None:
            carried.append(f"what the total weight of {float(share.weights[0]):g} is still to divide")
        if not carried:
            self.journal.note(
                "gradients changed by hand", "between manager.backward and manager.step, in place; the norm is theirs"
            )
            return
        raise MisuseError(
            f"the gradients were changed in place between manager.backward and manager.step, while they carry "
            f"{' and '.join(carried)}: a threshold on them is not the one that was meant, nor is the norm",
            "manager.step clips, once and unscaled: MixedPrecisionManager(max_norm=…), and update.grad_norm is the "
            "norm; a factor or a mask belongs into parameter.register_hook; manager.discard() drops what is pending",
        )

    def require_gradients(self, binding: Binding, share: Share) -> None:
        """Raise where contributions reached no parameter that this optimizer would update."""
        if binding.parameters[0].grad is not None or share.empty or self.contributor.buffers:
            return
        if any(parameter.grad is not None for parameter in binding.parameters):
            return
        raise MisuseError(
            f"none of the {len(binding.parameters)} parameters of the model has a gradient, after "
            f"{counted(len(share), 'contribution')}",
            "the loss was computed by another copy of the model, or from parameters the model had before it was moved "
            "or replaced; or gradients were cleared by hand: leave zero_grad() out",
        )

    def require_islands(self, binding: Binding) -> None:
        """Raise where an island in this model has not run by its first update."""
        if not self.unproven:
            return
        inside = {id(module) for root in binding.modules for module in root.modules()}
        for model, islands in list(self.unproven):
            if not inside.isdisjoint(map(id, model.modules())):
                islands.require_used()
                self.unproven.remove((model, islands))

    def require_precision(self, precision: Precision) -> None:
        """At the first update: say it where a half precision was declared and nothing ran in it."""
        if self.told or precision.entered:
            return
        self.told = True
        sight = self.contributor.sight
        half = sight is not None and (bool(sight.opaque) or any(dtype in HALVES for _, dtype in sight.operators))
        if precision.dtype is None or half:
            return
        seen = f"{precision.name} is declared, and manager.context() was never entered"
        scaled = "; the loss is scaled for nothing" if precision.scaled else ""
        self.journal.note("nothing ran in half precision", f"{seen}{scaled}")
        logging.getLogger("halfstep").warning(
            "nothing ran in half precision: %s%s. Wrap the forward in `with manager.context():`, or declare "
            'precision="fp32"',
            seen,
            scaled,
        )

    def verify(self, share: Share, verification: Verification) -> None:
        """Hold the weights of contributions that were weighed against what their losses divided by."""
        if not self.contributor.weigh or self.contributor.counted_examples is not None:
            return
        group = self.group
        reduction = "mean" if group is None else group.reduction
        size = share.micro_batches if group is None else group.size
        degree = self.contributor.replicas.degree
        verification.hold(share, reduction, size, self.account.attempted + 1, degree)

    def settle(self, binding: Binding, share: Share, known: list[frozenset[int]]) -> None:
        """After an attempt: its contributions are used, their group is over once all are."""
        self.ledger.settle(share)
        if not self.contributor.replicas.local:
            self.contributor.replicas.forget(binding.modules)
        self.contributor.leaves = []
        self.witnesses.keep(binding.parameters, binding.ids, known)
        group = self.group
        if group is not None and not self.ledger.pending:
            if group.short:
                self.account.last_group(
                    kept=True, micro_batches=group.own, size=group.size, examples=group.examples, ids=group.ids
                )
            self.position.used(group.own, group.examples)
            self.leave()

    def drop(self) -> None:
        """Forget what is pending; its gradients have been cleared."""
        self.contributor.drop()
        self.contributor.replicas.forget()
        self.witnesses.clear()
        self.leave()

    def leave(self) -> None:
        """Close the open group, if there is one."""
        if self.group is not None:
            self.group.leave()
            self.group = None

    # --- groups ---

    def require_no_group(self) -> None:
        """Called before another group is fetched: the one before must have been used."""
        group = self.group
        if group is None:
            return
        if group.whole:
            raise GroupError(
                f"group {group.index + 1} was contributed but not stepped before the next one was asked for",
                "manager.step(model, optimizer) after the loop over the group, or manager.discard()",
            )
        raise GroupError(
            f"group {group.index + 1} is still open with {group.progress()} contributed, and another one was asked "
            "for: the loop over it was left early, or groups were opened inside each other",
            "let the loop over a group end and step it; manager.discard() drops the open one",
        )

    def open(self, group: Group[Any]) -> None:
        """A group has been fetched."""
        self.require_no_group()
        if self.ledger.pending:
            raise MisuseError(
                f"{counted(len(self.ledger.pending), 'contribution')} made outside any group pending, and a group was "
                "opened: they have no common denominator",
                "manager.step before the group begins, or manager.discard()",
            )
        self.group = group
