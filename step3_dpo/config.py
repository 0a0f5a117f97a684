"""The flags of stage 3 by DPO, IPO or KTO."""

from typing import Any, Literal

from pipeline.configuration.ds_config import Json, Placement, frozen_json
from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig, OptimizerConfig
from pipeline.configuration.origins import Origin
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import PairDataConfig, SupervisedConfig
from pipeline.data.row_kinds import PAIRS
from step3_dpo.rows import RESPONSES

# Factor of LoRA's default learning rate over that of full training. Measured with SmolLM2-135M-Instruct: DPO of all
# weights at 5e-6 learns as much as LoRA of rank 32 at 6e-5 to 1e-4
# (benchmarks/reports/lora_rates_smollm2_h100_202611.md and lora_rates_smollm2_h200_202611.md).
LORA_FACTOR = 20.0


class ComparisonDataConfig(PairDataConfig):
    """Data"""

    take_reward_share: bool = flag(
        True,
        "Use stage 2's share of --data-split too; rlhf train sets false if stage 2 runs or has run in this folder",
    )


class DPOConfig(SupervisedConfig):
    """Stage 3 by DPO, IPO or KTO: train a policy on pairs or labelled responses, without a reward model."""

    rows, shares, drops_share_of = PAIRS.name, (1, 2), {2: "take_reward_share"}
    runs_by_section = True
    model: ModelConfig = ModelConfig(learning_rate=1e-6)
    data: ComparisonDataConfig = ComparisonDataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output/actor")
    method: Literal["dpo", "ipo", "kto"] = flag(
        "dpo",
        "dpo: logistic loss of the pair's difference of log-ratios; ipo: that difference's squared distance from 1 / "
        "(2 beta); kto: each response alone, good or bad, against the mean log-ratio",
        other_tools="loss_type pref_loss",
    )
    beta: float = flag(
        0.1,
        "Strength that holds the policy to the reference",
        gt=0,
        other_tools="pref_beta",
        refused=dict.fromkeys(
            ("ref_model", "ref_model_name_or_path"), "the reference is the model that training starts from"
        ),
    )
    label_smoothing: float = flag(
        0.0, "Assumed share of pairs with a wrong preference (cDPO)", ge=0, lt=0.5, read_if="--method dpo"
    )
    ipo_log_ratios: Literal["mean", "sum"] = flag(
        "mean", "Mean over a response's tokens, as in TRL, or their sum, as in the paper", read_if="--method ipo"
    )
    desirable_weight: float = flag(
        1.0, "Weight of the loss of good responses", gt=0, other_tools="kto_chosen_weight", read_if="--method kto"
    )
    undesirable_weight: float = flag(
        1.0, "Weight of the loss of bad responses", gt=0, other_tools="kto_rejected_weight", read_if="--method kto"
    )

    @property
    def card(self) -> str:
        """Heading of the model card."""
        return f"Policy trained by {self.method.upper()}"

    @property
    def row_options(self) -> dict[str, Any]:
        """The kind of rows that the method reads, and the shares of --data-split that it trains on."""
        shares = self.shares if self.data.take_reward_share else self.shares[1:]
        return {"rows": RESPONSES.name if self.method == "kto" else self.rows, "shares": shares}

    @property
    def lora_factor(self) -> float:
        """The factor of each method."""
        return LORA_FACTOR

    def engine_jsons(self, origins: dict[str, Origin], placement: Placement) -> dict[str, Json]:
        """Return the DeepSpeed JSONs of the model and of its reference, which runs before the model is loaded."""
        reference = frozen_json(self.deepspeed, self.model, placement, offload=False, role="reference")
        return super().engine_jsons(origins, placement) | {"reference": reference}
