"""A solver and a verifier, whose rewards differ in mean and scale."""

from __future__ import annotations

from itertools import islice
from random import Random
from typing import Any, ClassVar

from tasks import DIGITS, WIDTH, Drawn, chat, drill_answer, outcome, solved

from turnwise.arena import MultiTurnEpisode, Rubric, TreeSampler
from turnwise.tasks import Demonstration, OwnOptions
from turnwise.types import EpisodeState, Messages

PROMPTS = {"solver": "Merge.", "verifier": "Right?"}
VERDICTS = {True: "yes", False: "no"}


class VerifyOptions(OwnOptions):
    """``scale`` and ``offset`` change the verifier's reward, which is 1 for a true verdict."""

    actors: tuple[str, ...] = ("solver", "verifier")
    scale: float = 1.0
    offset: float = 0.0
    quality: float = 0.45
    max_tokens: int = 5


class VerifyEpisode(MultiTurnEpisode):
    """The solver takes the larger digits of two rows, and the verifier says whether the answer is right.

    The solver earns the share of right digits, and 1 if all are. The episode is solved if the answer is right and the
    verifier says so.
    """

    episode_type = "verify"

    def __init__(self, options: VerifyOptions, sampler: TreeSampler | None) -> None:
        super().__init__(sampler=sampler, max_turns=1)
        self.actors, self.options = options.actors, options
        self.rubric = Rubric([outcome, solved, verdict, answered], [1.0, 0.0, 0.0, 0.0])

    def setup(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data = {"question": artifact["question"], "said": {}}

    def build_messages(self, state: EpisodeState, arena: Any, artifact: Any) -> Messages:
        return [verify_messages(state.current_actor, state.data["question"], state.data["said"].get("solver", ""))[-1]]

    def env_response(self, state: EpisodeState, arena: Any, artifact: Any) -> None:
        state.data["said"][state.current_actor] = state.last_completion_text.strip()

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        said, answer = state.data["said"], drill_answer("merger", *state.data["question"].split("/"))
        share = sum(map(str.__eq__, said["solver"], answer)) / WIDTH if len(said["solver"]) == WIDTH else 0.0
        is_right = share == 1.0
        is_true = said["verifier"] == VERDICTS[is_right]
        options = self.options
        return {
            "outcome": {"solver": share + is_right, "verifier": options.offset + options.scale * is_true},
            "solved": dict.fromkeys(self.actors, float(is_right and is_true)),
            "answered": {"solver": float(is_right)},
            "verdict": {"verifier": float(is_true)},
        }


def answered(extras: dict[str, Any]) -> dict[str, float]:
    return extras["answered"]


def verdict(extras: dict[str, Any]) -> dict[str, float]:
    return extras["verdict"]


def verify_messages(actor: str, question: str, said: str) -> Messages:
    rows = question.split("/")
    shown = rows if actor == "solver" else [*rows, said if set(said) <= set(DIGITS) else "-" * WIDTH]
    return chat(PROMPTS[actor], "\n".join(shown))


class Verify(Drawn):
    name = "verify"
    success_metric = "solved/solver"
    system_prompts: ClassVar[dict[str, str]] = PROMPTS
    options_type = VerifyOptions

    def question(self, rng: Random) -> str:
        return "/".join("".join(rng.choices(DIGITS, k=WIDTH)) for _ in range(2))

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, VerifyEpisode]:
        return {"verify": VerifyEpisode(self.options, tree)}

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """Each digit of an answer is right with chance ``quality``, else the second row's. Half of the answers shown to
        the verifier are right, and three verdicts in four are true; the others are "no"."""
        rng, made = Random(f"verify-demonstrations/{seed}"), []
        for index, question in enumerate(islice(self.stream("train", f"demonstrations/{seed}"), n)):
            first, second = question.split("/")
            answer = drill_answer("merger", first, second)
            said = "".join(a if rng.random() < self.options.quality else b for a, b in zip(answer, second, strict=True))
            if index % 2 == 0:
                made.append(("solver", verify_messages("solver", question, ""), said))
                continue
            shown = answer if rng.random() < 0.5 else said
            is_true = rng.random() < 0.75
            made.append(
                ("verifier", verify_messages("verifier", question, shown), VERDICTS[is_true and shown == answer])
            )
        return made

    def texts(self) -> list[str]:
        return [*PROMPTS.values(), *VERDICTS.values(), f"{DIGITS}\n---"]
