"""The roles of stage 3: the models of a run, where each starts, its flags, and what is saved of it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Role:
    """A model of stage 3. PPOConfig returns its flags and its start.

    name: its name in metrics, logs and files of checkpoints, and its folder below --output-dir.
    title: its name in plans, DeepSpeed JSONs and fingerprints.
    flags: the field of PPOConfig that holds its ModelConfig; a frozen model has that of the trained model it resembles.
    prefix: prefix of the flags of this model alone, besides those of its ModelConfig; empty without such flags.
    path: the attribute of PPOConfig that names the model it starts from; empty: the path in its ModelConfig.
    card: heading of its model card, after the method's name; empty for a frozen model.
    has_values: True = it has a scalar head.
    number: number of a reward model of --more-reward-models, from 2; 0 for all other models.
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
        """True for a model whose scores are rewards."""
        return self.prefix == REWARD_PREFIX

    @property
    def is_trained(self) -> bool:
        """True for a model that is trained and saved."""
        return bool(self.card)


REWARD_PREFIX = "reward_model_"
COMPARED = ("reference", "teacher")  # policies to which the actor is compared; a run has at most one of them
REWARD = Role("reward", "reward model", "critic", prefix=REWARD_PREFIX, path="reward_path", has_values=True)
ROLES = (
    Role("actor", "actor", "actor", card="-tuned model"),
    Role("critic", "critic", "critic", card=" critic", has_values=True),
    Role("reference", "reference", "actor"),
    Role("teacher", "teacher", "actor", prefix="teacher_model_", path="teacher_path"),
    REWARD,
)


def roles_without(*names: str, num_further: int = 0) -> tuple[Role, ...]:
    """Return the roles of a run without the named models and with further reward models; the actor's first."""
    further = [
        replace(REWARD, name=f"reward_{n}", title=f"{REWARD.title} {n}", number=n) for n in range(2, 2 + num_further)
    ]
    return (*(role for role in ROLES if role.name not in names), *further)
