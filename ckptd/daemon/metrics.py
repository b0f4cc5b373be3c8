"""What a daemon tells Prometheus, read off its state when it is asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ckptd.daemon.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(service: Service) -> bytes:
    """All metrics, in Prometheus's text format. Called on the daemon's event loop."""
    return generate_latest(_Collected([*_saves(service), *_memory(service), *_trainers(service), *_copies(service)]))


def _counter(name: str, words: str, values: dict[str, float], label: str) -> CounterMetricFamily:
    family = CounterMetricFamily(name, words, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _gauge(name: str, words: str, values: dict[str, float], label: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, words, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _saves(service: Service) -> Iterator[Metric]:
    tally = service.saves.tally
    outcomes: dict[str, float] = {name: tally.counts[name] for name in ("durable", "committed", "failed", "skipped")}
    yield _counter("ckptd_saves", "Saves of ranks on this node that came so far.", outcomes, "outcome")
    seconds = {phase: tally.seconds[phase] for phase in ("queue", "write", "commit")}
    yield _counter("ckptd_save_seconds", "Seconds that saves spent in each phase.", seconds, "phase")
    yield CounterMetricFamily("ckptd_saved_bytes", "Bytes of shards that became durable.", value=tally.bytes)
    stages: Counter[str] = Counter(save.stage for save in service.saves.under_way())
    now = {stage: float(stages[stage]) for stage in ("queue", "write", "commit")}
    yield _gauge("ckptd_saves_under_way", "Saves that are neither committed nor failed.", now, "stage")
    ages = {run: time.time() - at for run, at in tally.committed_unix_seconds.items()}
    yield _gauge("ckptd_last_commit_age_seconds", "Since the newest commit of a run, as seen here.", ages, "run")
    verified = {root: time.time() - at for root, at in tally.verified_unix_seconds.items()}
    yield _gauge("ckptd_last_verified_age_seconds", "Since a checkpoint at a root was last verified.", verified, "run")
    steps = {run: float(version.step) for run, version in tally.committed.items()}
    yield _gauge("ckptd_last_commit_step", "The step of that commit.", steps, "run")


def _memory(service: Service) -> Iterator[Metric]:
    yield GaugeMetricFamily("ckptd_arena_bytes", "Shared memory of all arenas.", value=service.arenas.size_bytes)
    states = Counter(record.state.name.lower() for held in service.arenas.all() for _, record in held.records())
    slots = {state: float(states[state]) for state in ("free", "filling", "sealed", "durable")}
    yield _gauge("ckptd_slots", "Slots of all rings.", slots, "state")


def _trainers(service: Service) -> Iterator[Metric]:
    labels = ["run", "rank"]
    ages = GaugeMetricFamily(
        "ckptd_trainer_beat_age_seconds", "Since a trainer's last sign of progress.", labels=labels
    )
    steps = GaugeMetricFamily("ckptd_trainer_step", "The step that a trainer has done last.", labels=labels)
    losses = GaugeMetricFamily("ckptd_trainer_loss", "The loss that a trainer has reported last.", labels=labels)
    for session in service.sessions:
        owner = session.owner
        beat = None if owner is None else service.watch.last(owner)
        if owner is None or beat is None:
            continue
        of = [owner.seat.url, str(owner.seat.rank)]
        ages.add_metric(of, (time.monotonic_ns() - beat.monotonic_ns) / 1e9)
        steps.add_metric(of, beat.step)
        if beat.loss == beat.loss:
            losses.add_metric(of, beat.loss)
    yield from (ages, steps, losses)
    starts: dict[str, float] = {run: count for run, count in service.starts.items()}
    yield _counter(
        "ckptd_starts", "Starts of a run's trainers on this node; each but the first is a restart.", starts, "run"
    )
    raised: dict[str, float] = {kind: count for kind, count in service.watch.alerts.counts.items()}
    yield _counter("ckptd_alerts", "Alerts that were raised.", raised, "kind")


def _copies(service: Service) -> Iterator[Metric]:
    labels = ["run", "tier"]
    behind = GaugeMetricFamily("ckptd_tier_behind_seconds", "How long a further tier has been behind.", labels=labels)
    failures = GaugeMetricFamily("ckptd_tier_failures", "Failures in a row of copies to it.", labels=labels)
    for link in service.replication.links:
        of = [link.owner.seat.url, link.target.backend.url]
        behind.add_metric(of, time.time() - link.behind_since if link.behind_since else 0.0)
        failures.add_metric(of, link.failures)
    yield from (behind, failures)
