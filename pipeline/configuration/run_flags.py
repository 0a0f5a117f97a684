"""The flags of a run that every stage has: folders, length, checkpoints, evaluation and logs."""

from typing import Literal

from pydantic import field_validator

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Dtype, Group
from pipeline.hub import HUB_ID

# Flags behind those of a first start, with which a run resumes from what it has saved since.
RESUME = ("--overwrite", "false", "--resume", "auto")
# Flags of a run that only tries other flags.
TRIED = {
    "resume": "never", "overwrite": False, "keep_checkpoints": 0, "save_steps": 0, "eval_iters": 1, "print_steps": 1,
    "monitors": "none", "report": False, "push_to_hub": "",
}  # fmt: skip
# Flags of other trainers that no stage has, or not every one, and what to do instead.
OTHER_TRAINERS = {
    "chat_template": "the tokenizer's is used: save yours as chat_template.jinja in the model's folder",
    "num_generations": "only PPO, GRPO, RLOO and REINFORCE++ sample responses: --num-samples-per-prompt there",
    "use_vllm": "leave it out: responses are sampled here with the weights in training; see --generation-engine of PPO",
}


class RunConfig(Group):
    """Run"""

    output_dir: str = flag(
        "output", "Folder of the finished model (stage 3: of actor/, critic/)", kind="written path", on_resume="free"
    )
    run_dir: str = flag(
        "",
        "Folder of metrics, logs, checkpoints; empty: <parent>/runs/<stage>",
        kind="written path",
        on_resume="free",
        per_stage=True,
        ignored={"tensorboard_path": "curves are in <run_dir>/tensorboard"},
    )
    seed: int = flag(1234, "Seed of all random numbers of the run", ge=0)
    num_train_epochs: float = flag(
        1.0, "Passes over the training rows; may be fractional", gt=0, on_resume="free", other_tools="epochs"
    )
    max_steps: int = flag(
        0,
        "Stop after this many optimizer steps; 0: whole epochs",
        ge=0,
        on_resume="free",
        refused=dict.fromkeys(("enable_test_mode", "test_stop_step"), "use --max-steps") | OTHER_TRAINERS,
    )
    save_steps: int = flag(0, "Steps between checkpoints; 0: only at the end or on a signal", ge=0, on_resume="free")
    keep_checkpoints: int = flag(
        2,
        "Resume checkpoints to retain; older ones are deleted; 0: none; unset: 1 after the run is finished",
        ge=0,
        on_resume="free",
        other_tools="save_total_limit",
    )
    save_in_background: bool = flag(
        False, "Continue training while a checkpoint is written; needs host memory for a copy", on_resume="free"
    )
    resume: str = flag(
        "auto",
        "auto: newest valid checkpoint; never: start from scratch; or a checkpoint folder",
        kind="path",
        on_resume="free",
        other_tools="resume_from_checkpoint",
    )
    force_resume: bool = flag(False, "Resume even if settings, data or start models changed", on_resume="free")
    deterministic: bool = flag(False, "Bitwise repeatable on GPUs, slower; CPU runs always are", on_resume="rounding")
    overwrite: bool = flag(
        False, "Start over even if the output holds a finished run", on_resume="free", read_if="--resume auto or never"
    )
    save_dtype: Dtype = flag("auto", "Data type of the saved weights; auto: that of training", on_resume="output")
    print_steps: int = flag(
        1,
        "Steps between logged lines; unset: a line every 30 s to 5 minutes, and a progress bar on a terminal",
        ge=1,
        on_resume="free",
        other_tools="logging_steps",
        ignored={"print_loss": "the loss is printed every --print-steps"},
    )
    eval_interval: int = flag(
        0,
        "Steps between evaluations; 0: only before and after training",
        ge=0,
        on_resume="free",
        other_tools="eval_steps",
        ignored=dict.fromkeys(
            ("print_answers", "print_answers_interval"), "samples of each evaluation are in <run_dir>/samples.jsonl"
        ),
    )
    eval_iters: int = flag(
        0, "Batches of --per-device-eval-batch-size per evaluation, on each rank; 0: all rows", ge=0, on_resume="free"
    )
    monitors: list[Literal["tensorboard", "csv", "wandb", "trackio", "swanlab", "mlflow"]] = flag(
        ["tensorboard"],
        "Where metrics are logged in addition to <run_dir>/metrics.jsonl: tensorboard/ and metrics.csv in that "
        "folder, Weights & Biases, Trackio, SwanLab, MLflow (each needs its package); none: nowhere else",
        on_resume="free",
        switches={"enable_tensorboard": "tensorboard", "enable_csv": "csv", "enable_wandb": "wandb"},
        other_tools="report_to",
    )
    push_to_hub: str = flag(
        "",
        "Upload the finished model (stage 3: the actor) to this repository of the hub, private if new; empty: nowhere",
        on_resume="free",
        per_stage=True,
        other_tools="hub_model_id",
    )
    report: bool = flag(
        True, "Write report.html, report.md and curves/ during the run and at its end", on_resume="free"
    )
    process_group_timeout_s: int = flag(
        1800, "Seconds before a stuck collective or a wait for ranks fails", ge=1, on_resume="free"
    )
    rank_timeout_s: int = flag(
        1800, "Seconds without a heartbeat before a rank is hung and the run ends; 0: never", ge=0, on_resume="free"
    )
    dry_run: bool = flag(False, "Check all, print a plan of memory and batches, start nothing", on_resume="free")
    explain: bool = flag(
        False, "A dry run that also prints every flag with its origin, and DeepSpeed's JSON", on_resume="free"
    )
    show_data: int = flag(
        0,
        "Print row counts, lengths and this many rows as the model sees them, start nothing; 0: off",
        ge=0,
        le=10_000,
        on_resume="free",
    )
    target: str = flag(
        "",
        "A dry run for other hardware: 8xH100-80GB, 2x8xA100-40GB, RTX4090, 24GB, or a YAML file; empty: this machine",
        on_resume="free",
    )
    gpu_memory_gib: float = flag(
        0.0,
        "GiB of each GPU for this run, CUDA context included; limits plan, KV cache and process; 0: all of it",
        ge=0,
        on_resume="free",
        needs="a GPU",
    )
    auto: Literal["plan", "measure", "fit"] = flag(
        "plan",
        "How flags that are auto are chosen on GPUs; plan: by the plan; measure: by three test steps with each of the "
        "plan's best three; fit: by the plan, and if nothing fits, by the cheapest changes of any flags that train the "
        "same and fit",
        on_resume="free",
        other_tools="auto_find_batch_size",
        renamed={
            "auto_fit": {"true": "fit", "any": "fit", "false": "plan"},
            "auto_batch": {"true": "measure", "false": "plan"},
        },
    )
    verbose: bool = flag(
        False,
        "Show the output of DeepSpeed, torch and other libraries; false: only in <run_dir>/log/rank-<r>.txt",
        on_resume="free",
    )
    debug: bool = flag(False, "Show tracebacks of expected errors", on_resume="free")
    local_rank: int = flag(-1, "Set by launchers; the environment's LOCAL_RANK overrides it", on_resume="free")

    @property
    def starts_nothing(self) -> bool:
        """Return True for a dry run, by whichever flag, and for a look at the data."""
        return self.dry_run or self.explain or bool(self.target or self.show_data)

    @property
    def resumes_from(self) -> str:
        """Return `--resume`, which `--overwrite` turns into never."""
        return "never" if self.overwrite else self.resume

    @field_validator("push_to_hub")
    @classmethod
    def _names_a_repository(cls, text: str) -> str:
        if text and not HUB_ID.fullmatch(text):
            raise ValueError("expected the id of a repository, as my-name/my-model")
        return text
