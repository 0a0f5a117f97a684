"""Generation on a CUDA device: compiled kernels and captured graphs at real head sizes; `make test-gpu`.

The tests of tests/generation and tests/kernels need no GPU, and run compiled where there is one.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.chi_square import exact_probabilities, p_value
from support.decode_models import (
    DEVICE,
    EOS,
    KEY,
    PAD,
    assert_same,
    fused,
    generator_of,
    llama,
    opt,
    plain_logits,
    random_ids,
    random_prompts,
    rollouts,
    with_lora,
)
from transformers import GenerationConfig

from pipeline.generation.episodes import generate
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import FIRST_NEW_TOKENS, Generator
from pipeline.generation.options import CACHE_LENGTH_MULTIPLE
from pipeline.generation.rollouts import (
    GenerationStopped,
    Prompt,
    RandomKey,
    Sampling,
    Truncation,
    Vocabulary,
    rollout_uniforms,
)
from pipeline.generation.session import Capacity, Request
from pipeline.generation.slots import GenerationBuffers, slot_settings
from pipeline.inference.answer_settings import AnswerSettings, ReplySettings
from pipeline.inference.answers import as_chat_model, generate_answers
from pipeline.tensor_ops import pad_rows, round_up

pytestmark = pytest.mark.gpu

HEADS_OF_128 = {
    "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1536,
    "num_hidden_layers": 3,
}  # fmt: skip
# Head sizes of OPT-1.3B and of Llama: one key head for four query heads.
SHAPES: dict[str, Any] = {
    "opt, heads of 64": lambda: opt(hidden_size=512, word_embed_proj_dim=512, num_attention_heads=8, ffn_dim=4096),
    "opt-350m": lambda: opt(
        hidden_size=512, word_embed_proj_dim=256, num_attention_heads=8, ffn_dim=1024, do_layer_norm_before=False
    ),
    "llama, heads of 128": lambda: llama(**HEADS_OF_128),
    "an int8 base with adapters": lambda: with_lora(llama(**HEADS_OF_128), int8=True),
}
LENGTHS = (20, 3, 33, 1)
ENDS = [EOS, *range(20, 40)]
LONG = 4096


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> Any:
    """Small weights at a large width, so that logits are of the size of a real model's."""
    made = SHAPES[request.param]()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():  # of int8 codes, their scales
                parameter.mul_(0.25)
    return made


@torch.no_grad()
def forced(function: Any, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
    """(N, 1 + T, V) logits behind the prompts and behind each of T given tokens."""
    function.prepare(64)
    cache = function.new_cache(len(prompts), 64)
    everywhere = torch.arange(len(prompts), device=DEVICE)
    lengths = torch.tensor([len(ids) for ids in prompts], device=DEVICE)
    ids = pad_rows([torch.tensor(row) for row in prompts], PAD).to(DEVICE)
    actual = [function.prefill(ids, lengths, cache, slots=everywhere, source=everywhere)]
    active = torch.ones(len(prompts), dtype=torch.int32, device=DEVICE)
    for step in range(len(tokens[0])):
        given = torch.tensor([row[step] for row in tokens], device=DEVICE)
        actual.append(function.decode_step(given, (lengths + step).int(), active, cache))
    return torch.stack(actual, 1).float()


@torch.no_grad()
def plain(model: Any, prompts: list[list[int]], tokens: list[list[int]], *, together: bool) -> torch.Tensor:
    """The same by the model's own forward pass: rows one by one, or in one batch padded on the right."""
    rows = [torch.tensor([*prompt, *more]) for prompt, more in zip(prompts, tokens, strict=True)]
    batches = [rows] if together else [[row] for row in rows]
    logits = []
    for batch in batches:
        mask = pad_rows([torch.ones_like(row) for row in batch], 0).to(DEVICE)
        logits += list(model(input_ids=pad_rows(batch, PAD).to(DEVICE), attention_mask=mask).logits.float())
    kept = len(tokens[0]) + 1
    return torch.stack([row[len(prompt) - 1 :][:kept] for row, prompt in zip(logits, prompts, strict=True)])


@pytest.mark.parametrize("make", [fused, StaticCacheForward])
def test_logits_in_fp32(model, make):
    prompts, tokens = random_ids(LENGTHS), random_ids([6] * len(LENGTHS), 2)
    expected = plain(model, prompts, tokens, together=False)
    torch.testing.assert_close(forced(make(model), prompts, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copies", [1, 25], ids=["few rows", "many rows"])
@pytest.mark.parametrize("make", [fused, StaticCacheForward])
def test_logits_in_bf16_are_within_the_noise_of_two_batch_shapes(model, make, copies):
    """Both differ from fp32 by rounding; the decode step by no more than the model's own forward pass does."""
    lengths = LENGTHS * copies
    prompts, tokens = random_ids(lengths), random_ids([6] * len(lengths), 2)
    exact = plain(model, prompts, tokens, together=False)
    model.bfloat16()
    alone = plain(model, prompts, tokens, together=False)
    together = plain(model, prompts, tokens, together=True)
    actual = forced(make(model), prompts, tokens)
    own = max((part - exact).square().mean().sqrt().item() for part in (alone, together))
    assert (actual - exact).square().mean().sqrt().item() < 1.5 * own
    largest = max((alone - together).abs().max().item(), (alone - exact).abs().max().item())
    assert (actual - alone).abs().max().item() < 3 * largest


@pytest.mark.parametrize("make", [fused, StaticCacheForward])
@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 30, "temperature": 0.7}]
)
def test_rollouts_are_those_of_the_eager_loop(model, make, settings):
    """Early ends, and eight responses in three slots of a graph."""
    sampling = Sampling(20, **settings)
    actual, expected = rollouts(
        model, make(model), random_prompts(LENGTHS), sampling=sampling, num_samples=2, ends=ENDS
    )
    assert_same(actual, expected, tolerance=1e-4)
    assert settings or len({len(row) for row in actual.responses}) > 2


@pytest.mark.parametrize("make", [fused, StaticCacheForward])
def test_a_replayed_graph_is_the_step_itself(model, make, monkeypatch):
    """Bit for bit, and from call to call."""
    settings = {"num_samples": 2, "num_slots": 3, "sampling": Sampling(20), "key": KEY}
    prompts = random_prompts(LENGTHS)
    graphed = generator_of(make(model), ENDS)
    actual = [generate(graphed, prompts, **settings) for _ in range(2)]
    assert graphed._buffers._graph is not None
    monkeypatch.setattr("pipeline.generation.slots.GenerationBuffers._captured_graph", lambda buffers: None)
    actual.append(generate(generator_of(make(model), ENDS), prompts, **settings))
    for other in actual[1:]:
        assert_same(actual[0], other, tolerance=0.0)


@pytest.mark.parametrize("make", [fused, StaticCacheForward])
def test_the_graph_stays_when_the_weights_change(model, make):
    function = make(model)
    gen = generator_of(function, ENDS)
    prompts, common = random_prompts(LENGTHS), {"sampling": Sampling(12), "ends": ENDS}
    first, _ = rollouts(model, gen, prompts, **common)
    buffers = gen._buffers
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):  # not int8 codes, but their scales
            parameter.mul_(1.1)
    if make is fused:
        function.weights.refresh()
    second, expected = rollouts(model, gen, prompts, **common)
    assert gen._buffers is buffers
    assert_same(second, expected, tolerance=1e-4)
    assert any((a[0] - b[0]).abs() > 1e-3 for a, b in zip(first.log_probs, second.log_probs, strict=True))


def test_weights_that_move_get_another_graph():
    model = opt(hidden_size=64, word_embed_proj_dim=64)
    function = fused(model)
    gen = generator_of(function, ENDS)
    rollouts(model, gen, random_prompts(LENGTHS), sampling=Sampling(8), ends=ENDS)
    buffers = gen._buffers
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.05
    function.weights.refresh()
    actual, expected = rollouts(model, gen, random_prompts(LENGTHS), sampling=Sampling(8), ends=ENDS)
    assert_same(actual, expected, tolerance=1e-4)
    assert gen._buffers is not buffers


def test_graphs_are_captured_on_streams_that_exist(monkeypatch):
    """torch keeps memory, and cuBLAS a workspace, for each stream that was ever used."""
    generators = [generator_of(fused(opt(hidden_size=64, word_embed_proj_dim=64))) for _ in range(3)]
    request = {"num_samples": 1, "num_slots": 3, "sampling": Sampling(8), "key": KEY}
    generate(generators[0], random_prompts(LENGTHS), **request)
    made, stream = [], torch.cuda.Stream

    def counted(*args, **settings):
        """The current stream is asked for by its id; all others are new."""
        made.extend([] if "stream_id" in settings else [args])
        return stream(*args, **settings)

    monkeypatch.setattr(torch.cuda, "Stream", counted)
    for gen in generators[1:]:
        generate(gen, random_prompts(LENGTHS), **request)
        assert gen._buffers._graph is not None
    assert made == []


def test_a_stop_leaves_the_graph_usable():
    model = llama(hidden_size=128)
    gen = generator_of(fused(model))
    prompts, asked = random_prompts(LENGTHS), []
    with pytest.raises(GenerationStopped):
        generate(gen, prompts, num_samples=1, num_slots=3, sampling=Sampling(30), key=KEY,
            should_stop=lambda: bool(asked) or asked.append(None),
        )  # fmt: skip
    assert_same(*rollouts(model, gen, prompts, sampling=Sampling(30)), tolerance=1e-4)


@pytest.mark.parametrize("ends", [(), ENDS], ids=["full length", "early ends"])
def test_long_rollouts_are_those_of_one_pass_and_the_cache_has_the_length_that_is_there(ends):
    """4,096 + 4,096 tokens; where responses end early, no position but the first new ones is ever allocated."""
    model = llama(**HEADS_OF_128, max_position_embeddings=2 * LONG)
    with torch.no_grad():
        for parameter in (weight for weight in model.parameters() if weight.dim() > 1):
            parameter.mul_(0.25)
    gen = generator_of(fused(model), ends)
    prompts = random_prompts((LONG, LONG // 8, 1))
    found = generate(gen, prompts, num_samples=1, num_slots=3, sampling=Sampling(LONG), key=KEY)
    for prompt, response, log_probs in zip(found.prompts, found.responses, found.log_probs, strict=True):
        assert ends or len(response) == LONG
        logits = plain_logits(model, [*prompt.tolist(), *response.tolist()])[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, response.to(logits.device)[:, None]).squeeze(1)
        torch.testing.assert_close(log_probs.to(logits.device), expected, rtol=0.0, atol=1e-3)
    if ends:
        assert gen._buffers.cache_length <= round_up(LONG + FIRST_NEW_TOKENS, CACHE_LENGTH_MULTIPLE)
    else:
        assert gen._buffers.cache_length >= 2 * LONG


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 40}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_in_a_graph_follow_the_exact_distribution(settings, dtype):
    """100,000 draws from 5,000 tokens, whose three blocks the kernels join."""
    width, rows, replays = 5000, 4000, 25
    logits = (2 * torch.randn(width, generator=torch.Generator().manual_seed(4))).to(DEVICE, dtype)
    samplings, vocabulary = [Sampling(1, **settings)], Vocabulary(frozenset(), PAD)
    forward = SimpleNamespace(device=DEVICE, prepare=lambda length: None, new_cache=max, addresses=tuple)
    buffers = GenerationBuffers(forward, Capacity(rows, 1, 1), vocabulary, cache_length=1, max_cached_tokens=10**9)
    everywhere, uniforms = torch.arange(rows, device=DEVICE), torch.zeros(rows, dtype=torch.float64, device=DEVICE)
    tickets = [Request(n, Prompt([5], n), samplings[0], KEY, 0) for n in range(rows)]
    start = [values.to(DEVICE) for values in slot_settings(tickets)]
    buffers.slots.start(everywhere, torch.ones(rows, dtype=torch.int32, device=DEVICE), *start)
    buffers.truncate(Truncation.of(samplings))
    many = logits.repeat(rows, 1)

    def draw() -> None:
        buffers.slots.active.fill_(1)
        buffers.slots.position.zero_()
        buffers.draw(many, everywhere, everywhere, uniforms)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        draw()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw()
    counts = torch.zeros(width, device=DEVICE)
    for epoch in range(replays):
        uniforms.copy_(rollout_uniforms(RandomKey(5, "rollout", epoch), everywhere, everywhere * 0, 1)[:, 0])
        graph.replay()
        counts += torch.bincount(buffers.slots.written[:, 0], minlength=width)
    exact = exact_probabilities(logits.float().cpu(), **({"temperature": 1.0, "top_p": 1.0, "top_k": 0} | settings))
    assert p_value(counts.cpu(), exact) > 1e-3


def test_answers_come_from_the_fused_decode_step_and_are_those_of_transformers(bpe_tokenizer):
    """Greedy ones as by transformers' own `generate`; sampled ones as each prompt alone has them."""
    model = llama(hidden_size=128, vocab_size=len(bpe_tokenizer) + 9)
    chat_model = as_chat_model("model", model, bpe_tokenizer)
    assert isinstance(chat_model.sessions(), Generator)  # not the eager one
    prompts, greedy = random_ids((3, 17, 1)), ReplySettings(max_new_tokens=24)
    found = generate_answers(chat_model, prompts, greedy, seed=0)
    for prompt, (answer,) in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt], device=DEVICE)
        ends = {"eos_token_id": sorted(chat_model.vocabulary.eos_ids), "pad_token_id": PAD}
        unused = list(range(len(bpe_tokenizer), len(bpe_tokenizer) + 9))
        settings = GenerationConfig(do_sample=False, max_new_tokens=24, suppress_tokens=unused, **ends)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert list(answer.ids) == expected[0, len(prompt) :].tolist()
    hot = AnswerSettings(max_new_tokens=24, temperature=1.5, top_k=40, num_return_sequences=2)
    together = generate_answers(chat_model, prompts, hot, seed=4)
    assert together == [generate_answers(chat_model, [prompt], hot, seed=4)[0] for prompt in prompts]
    assert len({answer.ids for answers in together for answer in answers}) == 6
