"""A team to start from: a writer proposes a word, an editor improves it. Train it with `turnwise train run.toml`."""

from turnwise import MultiTurnEpisode, Rubric
from turnwise.tasks import OwnTask


def vowels(extras):
    """Score an episode: the share of vowels in the editor's word."""
    return extras["share"]


class Words(MultiTurnEpisode):
    episode_type = "words"
    actors = ("writer", "editor")  # they act in this order
    max_turns = 1
    rubric = Rubric([vowels])

    def get_prompt(self, artifact):
        return f"Word {artifact['question']}?"

    def step_reward(self, state, arena, artifact):
        """Reward one action; credit compares it with its siblings from the same state."""
        word = state.last_completion_text
        state.data["share"] = sum(letter in "aeiou" for letter in word) / max(len(word), 1)
        return state.data["share"]

    def get_extras(self, state):
        return {"share": state.data["share"]}


class MyTeam(OwnTask):
    name = "words"
    success_metric = "vowels/editor"
    system_prompts = {"writer": "Write.", "editor": "Edit."}

    def questions(self):
        return [str(number) for number in range(400)]

    def episodes(self, tree=None):
        return {"words": Words(sampler=tree)}
