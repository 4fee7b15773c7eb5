"""What ails a run: each diagnosis is a small function over metrics, which yields a line for each actor that it fits.

:data:`DIAGNOSES` lists them. A bound was set so that the diagnosis names the runs that have the illness, and none of
the healthy ones in ``tests/train/health/tables``. ``docs/diagnosis.md`` explains each one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from turnwise.train.health.history import ALIKE, EARLY, FAILED, SAME, SUCCEEDED, TIES, History

DONE = 0.9
"""Success from which on nothing is wrong with equal answers, or with groups that tie because all succeed."""

TIED = 0.75
"""Least share of tied groups."""

ONE_ANSWER, HABIT, FEW, MIXED = 0.9, 0.5, 4, 3
"""Least share of the commonest answer, now and in the first step, and number of different prompts in a step and in a
group that mixes them."""

SHARP, EXPLORES = 0.05, (0.05, 2.0)
"""Entropy of a start, in nats per token, below which groups whose attempts are all the same are its fault; and the
range of 97% of the starts of the learning table from which a run gained 10 points."""

FAR_KL, FAR_CLIPPED = 0.3, 0.4
"""Largest KL divergence of one step, in nats per token, and largest share of clipped tokens."""

FELL_TO, FELL_BY, FIRST = 0.25, 0.5, 10
"""One of the first steps moves an actor too far if it takes its entropy to this share or less, by this many nats per
token or more. No run of the learning table has such a step."""

NARROWER, EXPLORED, TIED_MORE = 0.5, 0.1, 0.1
"""An actor narrows if its entropy is at most this share of its start, which was so many nats per token or more, and so
many more of its groups tie than then."""

LOPSIDED = (0.75, 0.97)
"""Base rates that are far from one half. Beyond the second the function pays one word, whatever is judged."""

CUT, CUT_CALLS, UNREAD = 0.5, 0.1, 0.5
"""Largest shares: of answers at their token limit, of answers with a call that it cuts, and of calls that can't be
read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a diagnosis: what is wrong with ``actor`` (``None``: with the run), by which metric, and a remedy."""

    actor: str | None
    text: str
    remedy: str


Diagnosis = Callable[[History], Iterator[Finding]]

TIE_TEXTS = {
    FAILED: (
        "all attempts fail",
        "ask easier questions, pay for partial success, or start from better demonstrations; more attempts "
        "(rollout.group_size, rollout.branches) find rare successes",
    ),
    SUCCEEDED: ("all attempts succeed", "ask harder questions"),
    SAME: (
        "all attempts wrote the same",
        "raise rollout.temperature, stop the warm start earlier (warm_start.min_entropy), or add loss.entropy_coef",
    ),
    ALIKE: (
        "different answers got one reward",
        "let the reward tell them apart: pay for partial success, or for what the actor itself did",
    ),
}
"""What is said of each kind of tie, and the remedy."""


def ties(history: History) -> Iterator[Finding]:
    """Name the commonest reason for which an actor's groups tie, so that they don't train."""
    for actor in history.facts.actors:
        shares = {kind: history.now(f"groups/{kind}/{actor}") or 0.0 for kind in TIES}
        kind, tied = max(shares, key=lambda each: shares[each]), sum(shares.values())
        if tied < TIED or (kind == SUCCEEDED and not _too_easy(history, actor)):
            continue
        text, remedy = TIE_TEXTS[kind]
        yield Finding(
            actor,
            f"{tied:.0%} of its groups tie and don't train: in {shares[kind]:.0%} {text} (groups/{kind}/{actor})",
            remedy,
        )


def _too_easy(history: History, actor: str) -> bool:
    """Tell questions that are too easy from the start from those that the run has learned."""
    return (history.at_start(f"groups/{SUCCEEDED}/{actor}") or 0.0) >= TIED / 2


def tie_advice(shares: dict[str, float]) -> str:
    """Return what is said of the commonest kind of tie, with its remedy; '' if none is known."""
    kind = max(shares, key=lambda each: shares[each], default="")
    return "{}: {}".format(*TIE_TEXTS[kind]) if shares.get(kind) else ""


def one_answer(history: History) -> Iterator[Finding]:
    """Name an actor that answers different prompts alike, while the team does not yet succeed."""
    if (history.success() or 0.0) >= DONE:
        return
    for actor in history.facts.actors:
        prompts, distinct = history.now(f"answers/prompts/{actor}"), history.now(f"answers/distinct/{actor}")
        share = history.now(f"answers/commonest/{actor}") or 0.0
        if prompts is None or distinct is None or prompts < FEW or share < ONE_ANSWER:
            continue
        entropy, groups = history.now(history.of_actor("entropy", actor)), history.now(f"groups/compared/{actor}")
        told = "" if entropy is None else f", entropy {entropy:.2g} nats per token"
        mixed = (
            f". Its {prompts:.0f} prompts are compared in {groups:.0f} groups, so others' answers decide what pays: "
            'branch at each call (rollout.branches, credit.rule = "at_grpo" or "vine")'
            if groups and prompts >= MIXED * groups
            else ""
        )
        yield Finding(
            actor,
            f"{share:.0%} of its answers to {prompts:.0f} different prompts are the same "
            f"(answers/commonest/{actor}{told})",
            f"{_before(history, f'answers/commonest/{actor}')}, pay it for its own part of the outcome, and check that "
            f"its prompt shows what the right answer depends on{mixed}",
        )


def _before(history: History, name: str) -> str:
    """Return where to go back to: before the start, if the share called ``name`` was large in the first step."""
    first = history.early[0].get(name) or 0.0
    if first < HABIT:
        return "go back to a checkpoint before it with a lower update.lr"
    return (
        f"its start has this habit ({first:.0%} in the first step): begin with demonstrations whose answers follow "
        "from their prompts (warm_start), lower update.lr"
    )


def form_alone(history: History) -> Iterator[Finding]:
    """Name a function of the reward that was learned while success stayed what it was.

    Success may rise later, as long as the actor still explores: its entropy tells the two apart.
    """
    start, now = history.success(early=True), history.success()
    if history.steps < 10 or start is None or now is None or now > 0.8 or now - start >= 0.1:
        return
    for function, actor, before, after in history.functions():
        name = history.of_actor("entropy", actor)
        entropy, first = history.now(name), history.at_start(name)
        settled = history.steps >= 24 or (entropy is not None and first is not None and entropy <= 0.35 * first)
        if after >= 0.9 and after - before >= 0.15 and settled:
            yield Finding(
                actor,
                f"it learned {function} ({before:.0%} to {after:.0%}, metric/{function}/{actor}) and not the outcome "
                f"(success {start:.0%} to {now:.0%})",
                f"give {function} less weight beside the outcome, lower update.lr, and ask easier questions, so that "
                "20 to 50% of the first attempts succeed",
            )


def narrows(history: History) -> Iterator[Finding]:
    """Name an actor whose attempts become alike before the team gets better: soon nothing tells them apart."""
    start, now = history.success(early=True), history.success()
    if history.steps < 10 or start is None or now is None or now >= DONE or now - start >= 0.1:
        return
    for actor in history.facts.actors:
        name = history.of_actor("entropy", actor)
        entropy, first = history.now(name), history.at_start(name)
        ties = {
            kind: (history.at_start(f"groups/{kind}/{actor}"), history.now(f"groups/{kind}/{actor}")) for kind in TIES
        }
        before, tied = (sum(filter(None, shares)) for shares in zip(*ties.values(), strict=True))
        if entropy is None or first is None or first < EXPLORED or entropy > NARROWER * first:
            continue
        if tied < TIED and tied - before >= TIED_MORE:
            yield Finding(
                actor,
                f"its entropy fell from {first:.2g} to {entropy:.2g} nats per token ({name}), {tied:.0%} of its groups "
                f"tie (at the start {before:.0%}), and success stays ({start:.0%} to {now:.0%})",
                "it settles before it has found what pays: raise rollout.temperature, ask more questions in a step "
                "(rollout.prompts_per_step), pay it for its own part of the outcome, or add loss.entropy_coef",
            )


def own_part_falls(history: History) -> Iterator[Finding]:
    """Name an actor whose own part of the reward falls while the team's success rises: the team learns around it."""
    start, now = history.success(early=True), history.success()
    if history.steps < 8 or start is None or now is None or now - start < 0.1:
        return
    found = list(history.functions())
    for function, actor, before, after in found:
        shared = any(
            name == function and other != actor and (first, last) == (before, after)
            for name, other, first, last in found
        )
        if not shared and before - after >= 0.2:
            yield Finding(
                actor,
                f"its own {function} falls ({before:.0%} to {after:.0%}, metric/{function}/{actor}) while the team's "
                f"success rises ({start:.0%} to {now:.0%}): the team learns around it",
                f"pay it for the difference that it makes (reward.difference), or raise the weight of {function}; "
                f"turnwise eval RUN --ablate {actor} shows the team without it",
            )


def lopsided_verdict(history: History) -> Iterator[Finding]:
    """Name an actor that is paid for one of two answers, one of which is right nearly always."""
    for name in [name for name in history.recent[-1] if name.startswith("verdicts/base_rate/")]:
        function, _, actor = name.removeprefix("verdicts/base_rate/").rpartition("/")
        paid = history.facts.paid is None or function in history.facts.paid
        rate, skill = history.now(name), history.now(f"verdicts/skill/{function}/{actor}")
        if actor not in history.facts.actors or not paid or rate is None or skill is None:
            continue
        if LOPSIDED[0] <= max(rate, 1 - rate) <= LOPSIDED[1] and abs(skill) <= 0.3:
            commoner = "its commoner answer" if rate >= 0.5 else "its rarer answer"
            yield Finding(
                actor,
                f"{commoner} is right in {max(rate, 1 - rate):.0%} of the episodes ({name}), so saying always that "
                "pays, and looking does not",
                "balance what it judges, so that about half is right, or weigh the rarer case: pay 1 / (2 x its share) "
                "for each",
            )


def sharp_start(history: History) -> Iterator[Finding]:
    """Name an actor whose first steps explore nothing."""
    if history.steps != EARLY:
        return
    for actor in history.facts.actors:
        entropy = history.at_start(history.of_actor("entropy", actor))
        same = history.at_start(f"groups/{SAME}/{actor}")
        if entropy is not None and entropy < SHARP and same is not None and same >= 0.5:
            low, high = EXPLORES
            yield Finding(
                actor,
                f"its start is too sharp to explore: entropy {entropy:.2g} nats per token, and all attempts wrote the "
                f"same in {same:.0%} of the groups ({history.of_actor('entropy', actor)}, groups/{SAME}/{actor})",
                f"starts that learned had {low:g} to {high:g} nats: stop the warm start earlier "
                "(warm_start.min_entropy, fewer warm_start.steps), or raise rollout.temperature",
            )


def far_steps(history: History) -> Iterator[Finding]:
    """Name a policy that one step moves too far, and an actor whose entropy one of the first steps took away.

    With one update per step, only the entropy of the next step's samples shows how far it went.
    """
    for actor in history.facts.actors:
        name = history.of_actor("entropy", actor)
        if fall := _fall(history, name):
            before, after = fall
            yield Finding(
                actor,
                f"one step took its entropy from {before:.2g} to {after:.2g} nats per token ({name})",
                "start again with a lower update.lr, or let it rise slowly (update.warmup)",
            )
    policies = sorted(set(history.facts.actors.values()))
    for policy in policies:
        kl = history.now(history.of_policy("approx_kl_k3", policy), EARLY) or 0.0
        clipped = sum(
            history.now(history.of_policy(f"clip_fraction_{side}", policy), EARLY) or 0.0 for side in ("low", "high")
        )
        if kl > FAR_KL or clipped > FAR_CLIPPED:
            name = f" {policy!r}" if len(policies) > 1 else ""
            yield Finding(
                None,
                f"each step moves the policy{name} far: KL {kl:.2g} nats per token "
                f"({history.of_policy('approx_kl_k3', policy)}), {clipped:.0%} of the tokens clipped",
                "lower update.lr, or update.num_minibatches and update.ppo_epochs",
            )


def _fall(history: History, name: str) -> tuple[float, float] | None:
    """Return the entropy called ``name`` before and after the step that took it away."""
    rows = [row for row in history.recent if row.get(name) is not None]
    for at in range(len(rows) - 1):
        step, before, after = int(rows[at]["step"]), rows[at][name], [row[name] for row in rows[at + 1 :]]
        is_far = after[0] <= FELL_TO * before and before - after[0] >= FELL_BY
        if is_far and step <= FIRST and max(after) <= 2 * FELL_TO * before:
            return before, after[0]
    return None


def fell(history: History) -> Iterator[Finding]:
    """Name the fall of a team that had learned something, where the questions don't get harder by themselves."""
    now, best = history.success(), history.best
    drawn = any(name.startswith("curriculum/") for name in history.recent[-1])
    if drawn or now is None or best is None or best < 0.2 or now > 0.4 * best or history.steps <= EARLY:
        return
    yield Finding(
        None,
        f"success fell from {best:.0%} to {now:.0%} while sampling",
        "go back to the checkpoint before it (checkpoint.keep_best) with a lower update.lr; read the episodes: what "
        "do the agents do now?",
    )


def no_payoff(history: History) -> Iterator[Finding]:
    """Name a game that is not zero-sum and in which nobody earns anything any more."""
    mixed = history.at_start("payoffs/general_sum") or 0.0
    before, now = history.at_start("payoffs/none"), history.now("payoffs/none", EARLY)
    if before is None or now is None or mixed < 0.05 or before > 0.8 or now < 0.9:
        return
    yield Finding(
        None,
        f"{now:.0%} of the episodes end without a payoff to anyone, at the start {before:.0%} (payoffs/none)",
        "the agents settled on not trading: lower update.lr, pay a little for an agreement, or train one seat at a "
        "time (phases)",
    )


def cut_answers(history: History) -> Iterator[Finding]:
    """Name answers and calls of tools that their token limit cuts."""
    low = (history.success() or 0.0) <= 0.0 and history.success() is not None
    for actor in history.facts.actors:
        before, now = history.at_start(f"truncated/{actor}"), history.now(f"truncated/{actor}") or 0.0
        if now >= CUT and (low or now - (before or 0.0) >= 0.4):
            longer = now - (before or 0.0) >= 0.4
            yield Finding(
                actor,
                f"{now:.0%} of its answers end at their token limit (truncated/{actor}"
                + (f", at the start {before:.0%})" if longer else ")"),
                "the policy has lost the end of its answers: lower update.lr"
                if longer
                else "raise rollout.max_tokens or the actor's max_tokens, or show shorter answers in its prompt",
            )
        elif (share := history.now(f"cut_calls/{actor}") or 0.0) > CUT_CALLS:
            yield Finding(
                actor,
                f"the token limit cuts a call of a tool in {share:.0%} of its answers with calls (cut_calls/{actor})",
                "raise task_options.max_tokens, rollout.max_tokens or the actor's max_tokens",
            )


def unread_calls(history: History) -> Iterator[Finding]:
    """Name calls of tools that can't be read, by what they lack."""
    for actor in history.facts.actors:
        counts = {
            name.split("/")[2]: history.now(name) or 0.0
            for name in history.recent[-1]
            if name.startswith("metric/tool_calls/") and name.endswith(f"/{actor}")
        }
        unread = {status: count for status, count in counts.items() if status != "ok" and count}
        if unread and sum(unread.values()) >= UNREAD * sum(counts.values()):
            main = max(unread, key=lambda each: unread[each])
            share = sum(unread.values()) / sum(counts.values())
            yield Finding(
                actor,
                f"{share:.0%} of its calls of tools can't be read, mostly {main} (metric/tool_calls/{main}/{actor})",
                "show a call in its prompt as the model's own chat template writes it",
            )


DIAGNOSES: dict[str, Diagnosis] = {
    "one-answer": one_answer,
    "form-alone": form_alone,
    "narrows": narrows,
    "own-part-falls": own_part_falls,
    "lopsided-verdict": lopsided_verdict,
    "sharp-start": sharp_start,
    "far-steps": far_steps,
    "fell": fell,
    "no-payoff": no_payoff,
    "cut-answers": cut_answers,
    "unread-calls": unread_calls,
    "ties": ties,
}
"""Diagnoses by name, which is also their heading in ``docs/diagnosis.md``."""
