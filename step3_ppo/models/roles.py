"""The roles of stage 3: which models a run has, where each comes from, which flags it has, what is saved of it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Role:
    """A model of stage 3; PPOConfig says its flags and its start.

    name: its name in metrics, logs and files of checkpoints, and its folder below --output-dir.
    title: its name in plans, DeepSpeed JSONs and fingerprints.
    flags: the field of PPOConfig that holds its ModelConfig; a model that is only read has that of its trained twin.
    prefix: prefix of the flags that are its alone, besides those of its ModelConfig; empty: it has none.
    path: the attribute of PPOConfig that names the model it starts from; empty: the path in its ModelConfig.
    card: heading of the model card in its folder, behind the method's name; empty where it is only read.
    has_values: True = it has a scalar head.
    number: of the reward models that --more-reward-models names, from 2; 0: of no further model.
    """

    name: str
    title: str
    flags: str
    prefix: str = ""
    path: str = ""
    card: str = ""
    has_values: bool = False
    number: int = 0

    @property
    def is_reward_model(self) -> bool:
        """True for each model whose scores are rewards."""
        return self.prefix == REWARD_PREFIX

    @property
    def is_trained(self) -> bool:
        """True where the model learns, and is saved."""
        return bool(self.card)


REWARD_PREFIX = "reward_model_"
REWARD = Role("reward", "reward model", "critic", prefix=REWARD_PREFIX, path="reward_path", has_values=True)
ROLES = (
    Role("actor", "actor", "actor", card="-tuned model"),
    Role("critic", "critic", "critic", card=" critic", has_values=True),
    Role("reference", "reference", "actor"),
    REWARD,
)


def roles_without(*names: str, num_further: int = 0) -> tuple[Role, ...]:
    """Return the roles of a run that has none of these models, but further reward models; the actor's first."""
    further = [
        replace(REWARD, name=f"reward_{n}", title=f"{REWARD.title} {n}", number=n) for n in range(2, 2 + num_further)
    ]
    return (*(role for role in ROLES if role.name not in names), *further)
