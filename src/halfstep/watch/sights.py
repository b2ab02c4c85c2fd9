"""The subjects a session watches, in the order they are hooked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.watch.session import Session, Sight


def sights(session: Session) -> Sequence[Sight]:
    from halfstep.watch.announced import Announced
    from halfstep.watch.autocasts import Autocasts
    from halfstep.watch.averages import Averages
    from halfstep.watch.backwards import Backwards
    from halfstep.watch.beside import Beside
    from halfstep.watch.calls import Calls
    from halfstep.watch.casts import Casts
    from halfstep.watch.collectives import Collectives
    from halfstep.watch.compiled import Compiled
    from halfstep.watch.copies import Copies
    from halfstep.watch.culprit import Culprit
    from halfstep.watch.examples import Examples
    from halfstep.watch.failures import Failures
    from halfstep.watch.frozen import Frozen
    from halfstep.watch.gradients import Gradients
    from halfstep.watch.halves import Halves
    from halfstep.watch.hands import Hands
    from halfstep.watch.histories import Histories
    from halfstep.watch.loaders import Loaders
    from halfstep.watch.loose import LooseGradients
    from halfstep.watch.losses import Losses
    from halfstep.watch.marks import Marks
    from halfstep.watch.modules import Modules
    from halfstep.watch.optimizers import Optimizers
    from halfstep.watch.parameters import Parameters
    from halfstep.watch.poison import Poison
    from halfstep.watch.recomputations import Recomputations
    from halfstep.watch.replicas import Replicas
    from halfstep.watch.rounding import Rounding
    from halfstep.watch.scalers import Scalers
    from halfstep.watch.schedulers import Schedulers
    from halfstep.watch.states import States
    from halfstep.watch.statistics import Statistics
    from halfstep.watch.threads import Threads
    from halfstep.watch.trouble import Trouble

    gradients = Gradients(session)
    halves = Halves(session)
    scalers = Scalers(session, gradients, halves)
    autocasts = Autocasts(session)
    parameters = Parameters(session, gradients)
    modules = Modules(session, autocasts)
    losses = Losses(session)
    culprit = Culprit(session, gradients)
    poison = Poison(session, culprit.paths, culprit.provenance, modules)
    calls = Calls(session, modules)
    replicas = Replicas(session, modules)
    loaders = Loaders(session)
    schedulers = Schedulers(session)
    announced = Announced(session, gradients, scalers, halves, schedulers)
    beside = [Beside(session, gradients, modules)] if session.beside else []
    announced.attempts += [sight.about_to_update for sight in beside]
    announced.skipped += [sight.passed_over for sight in beside]
    return (
        Compiled(session),
        *beside,  # its traces come before attempts
        Optimizers(session, gradients, scalers, halves),
        scalers,
        gradients,
        announced,
        Hands(session, gradients),
        halves,
        losses,
        Backwards(session, gradients, scalers, autocasts, losses, halves, culprit),
        culprit,
        poison,
        calls,
        Trouble(session, gradients, calls, culprit, poison),
        schedulers,
        loaders,
        parameters,
        Averages(session, parameters, halves),
        Rounding(session, parameters, halves),
        Frozen(session, parameters, gradients, modules),
        Histories(session, parameters),
        Statistics(session, parameters),
        LooseGradients(session, modules),
        autocasts,
        Casts(session, autocasts),
        modules,
        Copies(session, autocasts, modules),
        Threads(session, autocasts, modules),
        Recomputations(session, autocasts, modules),
        Failures(session),
        replicas,
        Collectives(session, replicas),
        Examples(session, modules, replicas, loaders),
        Marks(session, replicas, parameters),
        States(session),
    )
