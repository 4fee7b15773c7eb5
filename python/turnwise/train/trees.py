"""The tree that a configuration asks for, and whether the credit rule can do with it."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.arena import TreeSampler
from turnwise.credit import registry
from turnwise.naming import nearest
from turnwise.train.config import TrainConfig, TreeConfig
from turnwise.train.config_files import ConfigError
from turnwise.types import CreditAssigner


def sampler_of(config: TrainConfig, actors: Sequence[str]) -> TreeSampler | None:
    """The tree of ``rollout.branches`` and ``rollout.tree``, if there is one."""
    branches, tree = config.rollout.branches, config.rollout.tree
    if branches == 1 and tree == TreeConfig():
        return None
    if unknown := [actor for actor in tree.branch_at or () if actor not in actors]:
        raise ConfigError(
            f"config key 'rollout.tree.branch_at': no actor {unknown[0]!r}; {nearest(unknown[0], actors)}"
        )
    if branches == 1 and not tree.playouts:
        raise ConfigError("config key 'rollout.tree': needs rollout.branches > 1, or rollout.tree.playouts > 0")
    try:
        return TreeSampler(branches, **tree.model_dump(), share_steps=config.steps)
    except ValueError as error:
        raise ConfigError(f"config key 'rollout.tree': {error}") from error


def tree_problem(credit: CreditAssigner, config: TrainConfig) -> str:
    """Why the rule and the tree of ``config`` don't go together; empty where they do."""
    branches, tree, rule = config.rollout.branches, config.rollout.tree, config.credit.rule
    plain = branches == 1 or (tree.select == "none" and getattr(credit, "ends", True))
    if not plain and not getattr(credit, "trees", True):
        either = ", or rollout.tree.select = 'none'" if getattr(credit, "ends", True) else ""
        return (
            f"config key 'credit.rule' = {rule!r}: the rule needs plain trajectories: expected rollout.branches = 1, "
            f"not {branches}{either}"
        )
    values = getattr(credit, "values_of_states", False)
    if values and branches == 1 and not tree.playouts:
        return (
            f"config key 'credit.rule' = {rule!r}: the rule takes the values of states from the branches of a tree or "
            "from playouts: expected rollout.branches > 1, or rollout.tree.playouts > 0"
        )
    if tree.playouts and not values and rule in registry and tree.select_by != "value":
        return (
            f"config key 'rollout.tree.playouts' = {tree.playouts}: has no effect: expected credit.rule = "
            f"'vine', not {rule!r}, or rollout.tree.select_by = 'value'"
        )
    return ""
