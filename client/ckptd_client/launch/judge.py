"""What is done about a start that failed, for all of its nodes: the policy's decision, and the mark that it takes."""

from __future__ import annotations

from collections.abc import Mapping

from ckptd.errors import CkptdError, CrashLoop, TrainingStopped
from ckptd.jitter import backoff_seconds
from ckptd_client.launch.council import Report, Ruling, merged
from ckptd_client.launch.journal import Journal
from ckptd_client.launch.lookout import Lookout
from ckptd_client.launch.policy import Failure, History, Policy, RestartRules


class Judge:
    """Of one node; only one of a start is called."""

    def __init__(self, rules: RestartRules, lookout: Lookout, journal: Journal) -> None:
        self.history = History()
        """Of the failures before, whichever node judged them."""
        self._rules = rules
        self._lookout = lookout
        self._journal = journal

    def rule(self, launch: str, reports: Mapping[int, Report], nodes: int) -> Ruling:
        """On a start of so many nodes, by those that gave a report."""
        if any(report.stopping for report in reports.values()):
            return Ruling.stop(TrainingStopped("another node was asked to stop"), self.history)
        policy = Policy(self._rules, backoff_seconds, self.history)
        failure = merged(reports, nodes)
        decision = policy.judge(failure)
        error = self._go_back(launch, failure) if decision.what == "back" else decision.error
        if error is not None:
            return Ruling.stop(error, policy.history)
        return Ruling(wait_seconds=decision.wait_seconds, history=policy.history)

    def _go_back(self, launch: str, failure: Failure) -> CkptdError | None:
        """Have the checkpoint doubted that this start came from. An error where there is none to go back to."""
        reason = f"restored, and then: {in_words(failure)}, again and again"
        try:
            version = self._lookout.doubt(launch, reason)
        except CkptdError as error:
            self._journal.tell("not_doubted", f"the checkpoint could not be marked as suspect: {error}")
            return None
        if not version:
            return CrashLoop(f"{in_words(failure)}, again and again, and no checkpoint is to blame: it began anew")
        self._journal.tell("doubted", f"marked {version} as suspect: going one checkpoint back", version=version)
        return None


def in_words(failed: Failure | Report) -> str:
    """What happened, and where."""
    what = failed.what or "another node failed"
    if not failed.stepped:
        return f"{what}, before its first step"
    return what if failed.last_step is None else f"{what}, after step {failed.last_step}"
