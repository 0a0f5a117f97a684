"""What the plan of stage 3 takes from the run's functions: models, schedule, options, backend, copies, the cache."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.decode_models import llama, opt
from support.engines import engine_of
from support.messages import naming
from transformers import PretrainedConfig

import step3_ppo.models.engines
import step3_ppo.models.needs
from benchmarks.speed.planned import LONG_7B, LONG_7B_MEASURED, OPT, planner_of, ppo
from benchmarks.speed.random_models import config_of
from pipeline.cache_memory import keeps_cache
from pipeline.configuration.flags import parse
from pipeline.configuration.groups import ModelConfig
from pipeline.configuration.rank_rules import with_ranks
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.generation.forwards.fused_weights import DecodeWeights
from pipeline.generation.options import GenerationOptions
from pipeline.models.decoders.families import read_architecture
from pipeline.models.lora import add_lora
from pipeline.planning import memory
from pipeline.planning import needs as planning_needs
from pipeline.planning.needs import ModelUse
from pipeline.planning.page import StagePlan, stage_page
from step3_ppo.config import PPOConfig
from step3_ppo.models.engines import Sources
from step3_ppo.models.needs import backend_of, decode_needs, decode_weights, needs
from step3_ppo.models.roles import ROLES


@pytest.mark.parametrize(
    "free, taken, stays",
    [(34, 0, True), (33, 0, False), (20, 18, True), (20, 19, False), (80, 74, False), (80, 73, True)],
)
def test_the_cache_stays_with_a_third_free_at_first_and_later_with_what_an_update_took(free, taken, stays):
    """Later 1.09 x 18 = 19.6 and 1.09 x 73 = 79.6 of 100 bytes: the share of the device is no matter then."""
    assert keeps_cache(free, 100, taken=taken) == stays


@pytest.mark.parametrize("phase", ["generate", "score", "train"])
def test_a_run_that_keeps_its_cache_is_planned_so(phase):
    """Llama-7B with LoRA, 64 rows of 256 + 1,024 on one H200: 132.45 GiB were measured where 80.1 were planned."""
    planner, resolved = planner_of("ppo", LONG_7B, "1xH200")
    plan = planner.memory(resolved)
    measured = LONG_7B_MEASURED[phase]
    assert plan.phases[phase].total / GIB == pytest.approx(measured, abs=max(1.0, 0.05 * measured))
    assert plan.keeps_buffers


@pytest.mark.parametrize(
    "first, later, line",
    [
        (True, True, "stays in memory during the update"),
        (True, False, "in memory ... first update only"),
        (False, True, "stays in memory during the update"),
        (False, False, "freed before the update"),
    ],
)
def test_the_plan_asks_the_rule_of_the_run_for_the_first_update_and_for_later_ones(monkeypatch, first, later, line):
    """With what is free at the end of a rollout: all but states, cache and copies, and CUDA's own; and what an update
    takes above them."""
    calls: list[tuple[int, int, int]] = []

    def answer(free: int, device: int, *, taken: int) -> bool:
        calls.append((free, device, taken))
        return later if taken else first

    monkeypatch.setattr(memory, "keeps_cache", answer)
    planner, resolved = planner_of("ppo", ppo(OPT, 16, 4, 2), "1xH200")
    plan = planner.memory(resolved)
    update, device = plan.phases["train"], planner.target.memory
    free = device - plan.besides[0] - update.states - plan.phases["generate"].rollout
    assert calls == [(free, device, 0), (free, device, update.total - update.rollout - update.states)]
    assert (plan.keeps_buffers, update.rollout > 0) == (later, first or later)
    assert naming(line) in stage_page(StagePlan.of(planner, resolved, 0))


def test_a_first_update_that_lacks_memory_beside_the_cache_is_planned_without_it(monkeypatch, tmp_path):
    """The run makes it again, and releases the cache from then on."""
    monkeypatch.setattr(memory, "keeps_cache", lambda free, device, *, taken: not taken)
    target = tmp_path / "small.yaml"
    target.write_text("memory_gib: 41", encoding="utf-8")
    planner, resolved = planner_of("ppo", ppo(OPT, 16, 4, 2), str(target))
    plan = planner.memory(resolved)
    assert plan.phases["train"].rollout == 0 and not plan.keeps_buffers


def adapter_start(folder: Path, zero_stage: int, *, reward: str = "") -> PPOConfig:
    """Settings of LoRA that goes on in an adapter folder of the actor, whose critic is a whole model."""
    for shape in ("llama-tiny", "tiny"):
        config_of(shape).save_pretrained(folder / shape)
    for name in ("actor", "critic"):
        (folder / name).mkdir(exist_ok=True)
        adapter = {"base_model_name_or_path": str(folder / "llama-tiny"), "peft_type": "LORA", "r": 2}
        (folder / name / "adapter_config.json").write_text(json.dumps(adapter))
    words = f"--actor-model-name-or-path {folder}/actor --critic-model-name-or-path {folder}/critic --dtype bf16"
    words += f" --actor-lora-dim 2 --critic-lora-dim 2 --actor-zero-stage {zero_stage} --critic-zero-stage {zero_stage}"
    return parse(PPOConfig, [*words.split(), *reward.split()], section="ppo").config


@pytest.mark.parametrize("zero_stage, frozen", [(2, []), (3, ["reference", "reward model"])])
def test_start_adapters_under_zero_3_leave_reference_and_reward_model_of_their_own(tmp_path, zero_stage, frozen):
    """Their partitioned copies cannot be switched to."""
    config = adapter_start(tmp_path, zero_stage)
    assert [role.title for role in config.held_roles] == ["actor", "critic", *frozen]
    assert [use.role for use in needs(config, {}, "bf16", 2).models] == ["actor", "critic", *frozen]


def test_a_reward_model_of_its_own_folder_is_held_beside_the_critic(tmp_path):
    config = adapter_start(tmp_path, 2, reward=f"--reward-model-name-or-path {tmp_path}/llama-tiny")
    assert [role.name for role in config.held_roles] == ["actor", "critic", "reward"]
    assert config.start_of(config.held_roles[-1]) == f"{tmp_path}/llama-tiny"
    use = needs(config, {f"{tmp_path}/llama-tiny": f"{tmp_path}/tiny"}, "bf16", 1).models[-1]
    assert (use.path, use.trained, use.has_values) == (f"{tmp_path}/tiny", False, True)


@pytest.mark.parametrize("frozen", [(), ("reference",), ("reward model",), ("reference", "reward model")])
def test_the_run_loads_the_models_that_the_plan_counts(monkeypatch, tmp_path, frozen):
    """Both ask `PPOConfig.held_roles`."""
    config, loaded = adapter_start(tmp_path, 2), []
    held = [role for role in ROLES if role.is_trained or role.title in frozen]
    monkeypatch.setattr(PPOConfig, "held_roles", held)

    def engine(role: str) -> SimpleNamespace:
        loaded.append(role)
        raw = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
        return SimpleNamespace(module=SimpleNamespace(model=raw, get_submodule=lambda name: raw))

    monkeypatch.setattr(step3_ppo.models.engines, "language_model_engine", lambda *_, **__: engine("actor"))
    monkeypatch.setattr(step3_ppo.models.engines, "value_model_engine", lambda *_, **__: engine("critic"))
    monkeypatch.setattr(step3_ppo.models.engines, "frozen_engine", lambda *_, name: engine(name))
    for name in ("keep_start_adapter", "enable_packed_attention"):
        monkeypatch.setattr(step3_ppo.models.engines, name, lambda *_, **__: None)
    monkeypatch.setattr(step3_ppo.models.engines, "base_model", lambda model: model)
    config = config.replace(ppo=config.ppo.replace(normalise_scores=False).model_dump())
    run = SimpleNamespace(world=SimpleNamespace(device=None))
    start = SimpleNamespace(base=None, config=PretrainedConfig())
    sources = Sources({role.name: start for role in ROLES}, tokenizer=None, reward_tokenizers={"reward": None})  # type: ignore
    step3_ppo.models.engines.make_models(run, config, sources)
    assert loaded == [use.role for use in needs(config, {}, "bf16", 1).models] == ["actor", "critic", *frozen]


def test_schedule_options_and_backend_of_a_plan_are_those_of_the_run(monkeypatch):
    planner, resolved = planner_of("ppo", ppo(OPT, 16, 4, 2), "1xH200")
    plain = planner.needs(resolved)
    schedule, options = step3_ppo.models.needs.make_schedule, step3_ppo.models.needs.generation_options
    assert plain.rollout.copied_bytes == 0 and plain.num_steps(640) == 10 * plain.steps_each == 10
    with monkeypatch.context() as patch:
        patch.setattr(
            step3_ppo.models.needs,
            "make_schedule",
            lambda *words, **named: replace(schedule(*words, **named), steps_per_rollout=7, total_steps=70),
        )
        planner = replace(planner, cached={})
        changed = planner.needs(resolved)
        assert (changed.steps_each, changed.num_steps(640)) == (7, 70)
        page = "\n".join(stage_page(StagePlan.of(planner, resolved, 640)))
        assert page == naming("70 optimizer steps in 10 rollouts ... --num-train-epochs 1")
    with monkeypatch.context() as patch:
        patch.setattr(
            step3_ppo.models.needs,
            "generation_options",
            lambda config, ranks: replace(
                options(config, ranks), min_slots=5, max_sequence_length=100, release_cache=True
            ),
        )
        buffers = replace(planner, cached={}).needs(resolved).rollout
        assert (buffers.slots, buffers.cache_length, buffers.always_released) == (5, 128, True)
    forgotten = backend_of, decode_needs
    for cached in forgotten:
        cached.cache_clear()
    monkeypatch.setattr(step3_ppo.models.needs, "choose_backend", lambda *_: ("eager", []))
    assert replace(planner, cached={}).needs(resolved).rollout.kernels_per_step > 1.9 * plain.rollout.kernels_per_step
    for cached in forgotten:
        cached.cache_clear()


MODELS = {"opt": opt, "llama": llama}


@pytest.mark.parametrize("lora_dim", [0, 3])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_copied_weights_are_counted_as_a_real_engine_has_them(world, tmp_path, name, zero_stage, lora_dim):
    """Views where DeepSpeed's flat buffers join projections, copies where it does not, or partitions, or adds LoRA."""
    model = MODELS[name]()
    model.config.save_pretrained(tmp_path)
    if lora_dim:
        model = add_lora(model, dim=lora_dim, alpha=8, dropout=0.0, module_name="all-linear", only_lora=True,
                         task="CAUSAL_LM", seed=1)  # fmt: skip
    real = DecodeWeights(read_architecture(engine_of(model, zero_stage).module.model))
    settings = ModelConfig(zero_stage=zero_stage, lora_dim=lora_dim)
    use = ModelUse("actor", str(tmp_path), settings)
    planned, _ = decode_weights(use, "fp32", GenerationOptions(), 1)
    assert planned.num_bytes_to_copy == real.num_bytes_to_copy
    assert (planned.num_bytes_to_copy == 0) == (zero_stage == 2 and not lora_dim)


def test_a_quantised_base_is_read_where_it_is(tmp_path):
    """int8 codes are views beside which each adapter's B is copied; 4 bits have no fused backend."""
    config_of("llama-tiny").save_pretrained(tmp_path)
    merged, int8, nf4 = (
        decode_weights(
            ModelUse("actor", str(tmp_path), ModelConfig(zero_stage=0, lora_dim=2, quantization=quantization)),
            "bf16", GenerationOptions(), 1,
        )[0]
        for quantization in ("none", "int8", "nf4")
    )  # fmt: skip
    hidden, keys, inner, layers = 32, 16, 48, 2
    assert merged.num_bytes_to_copy == 2 * layers * (2 * hidden * (hidden + keys) + 3 * hidden * inner)
    # Joined layers have a block of each: of 6 ranks for q, k and v, of 4 for gate and up.
    ups = (hidden + 2 * keys) * 6 + hidden * 2 + 2 * inner * 4 + hidden * 2
    assert int8.num_bytes_to_copy >= 2 * layers * ups
    assert nf4 is None


def test_streamed_weights_take_a_slice_of_each_rank(tmp_path):
    """Slices of all layers, buffers of up to two groups, embeddings and norms whole."""
    config_of("llama-tiny").save_pretrained(tmp_path)
    use = ModelUse("actor", str(tmp_path), ModelConfig(zero_stage=3))
    few, many = (decode_weights(use, "bf16", GenerationOptions(weights="streamed"), ranks)[1] for ranks in (2, 8))
    assert few.num_bytes_to_copy - many.num_bytes_to_copy == few.slice_bytes - many.slice_bytes > 0
    assert few.replicated_bytes == many.replicated_bytes > 0


SMALL = "--actor-model-name-or-path 125m --critic-model-name-or-path 125m"


@pytest.mark.slow
@pytest.mark.parametrize("fit", [False, True])
def test_the_plan_streams_a_rollouts_weights_where_the_rule_of_the_run_says_so(monkeypatch, fit):
    """It is asked with whole copies, a slot of 256 + 256 tokens, and what states and CUDA's own leave of a GPU."""
    planner, resolved = planner_of("ppo", ppo(SMALL, 16, 4, 3), "2xH200")
    whole, forced = (
        planner.memory(with_ranks(resolved.changed({"rollout_weights": weights}), 2))
        for weights in ("whole", "streamed")
    )
    calls: list[tuple[int, int, int]] = []

    def answer(*figures: int) -> bool:
        calls.append(figures)
        return fit

    monkeypatch.setattr(planning_needs, "leave_slots", answer)
    plan = planner.memory(resolved)
    one, other = (whole, forced) if fit else (forced, whole)
    assert plan.phases == one.phases
    assert plan.rollout.copied_bytes == one.rollout.copied_bytes != other.rollout.copied_bytes
    free = planner.target.memory - sum(one.resident for one in plan.states.values()) - plan.besides[0]
    cached_token = 12 * 2 * 768 * 2
    assert calls == [(whole.rollout.copied_bytes, 512 * cached_token, free)]


@pytest.mark.parametrize("words", ["--inference-tp-size 2", "--generation-engine static"])
def test_weights_that_a_run_cannot_stream_are_planned_whole(words):
    planner, resolved = planner_of("ppo", ppo(SMALL, 16, 4, 3, words), "2xH200")
    rollout = planner.needs(resolved).rollout
    assert rollout.streamed is None and rollout.as_decided(free=0) is rollout


def test_a_cache_that_fills_what_is_free_has_no_unused_blocks_beside_it(tmp_path):
    """One of all rows has 4 % of them, one of fewer rows would have had fewer still."""
    file = tmp_path / "small.yaml"
    for gib, fills in ((139, False), (5, True)):
        file.write_text(f"memory_gib: {gib}", encoding="utf-8")
        planner, resolved = planner_of("ppo", ppo(SMALL, 4, 16, 2), str(file))
        plan = planner.memory(resolved)
        peak = plan.phases["generate"]
        cache = plan.slots * 512 * 12 * 2 * 768 * 2
        assert (plan.slots < 64) == fills and peak.rollout == cache
        rest = 0.04 * (peak.total - fills * cache)
        assert plan.reserved("generate")[0] == pytest.approx(peak.total + rest + peak.graph + plan.besides[0], abs=1)


def test_a_rollout_that_so_many_ranks_cannot_share_is_no_plan():
    """12 heads: a run would refuse it, so no remedy proposes it."""
    planner, resolved = planner_of("ppo", ppo(SMALL, 16, 4, 3, "--inference-tp-size 5"), "5xH200")
    with pytest.raises(InputError, match=naming("--inference-tp-size 5 ... 12 heads")):
        planner.needs(resolved)
