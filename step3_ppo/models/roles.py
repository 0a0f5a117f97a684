"""The roles of stage 3: which models a run has, where each comes from, which flags it has, what is saved of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """A model of stage 3; PPOConfig says its flags and its start.

    name: its name in metrics, logs and files of checkpoints, and its folder below --output_dir.
    title: its name in plans, DeepSpeed JSONs and fingerprints.
    flags: the field of PPOConfig that holds its ModelConfig; a model that is only read has that of its trained twin.
    prefix: prefix of the flags that are its alone, besides those of its ModelConfig; empty: it has none.
    path: the attribute of PPOConfig that names the model it starts from; empty: the path in its ModelConfig.
    card: heading of the model card in its folder, behind the method's name; empty where it is only read.
    has_values: True = it has a scalar head.
    """

    name: str
    title: str
    flags: str
    prefix: str = ""
    path: str = ""
    card: str = ""
    has_values: bool = False

    @property
    def is_trained(self) -> bool:
        """True where the model learns, and is saved."""
        return bool(self.card)


ROLES = (
    Role("actor", "actor", "actor", card="-tuned model"),
    Role("critic", "critic", "critic", card=" critic", has_values=True),
    Role("reference", "reference", "actor"),
    Role("reward", "reward model", "critic", prefix="reward_model_", path="reward_path", has_values=True),
)


def roles_without(*names: str) -> tuple[Role, ...]:
    """Return the roles of a run that has none of these models, the actor's first."""
    return tuple(role for role in ROLES if role.name not in names)
