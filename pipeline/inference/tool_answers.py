"""Answers to the prompts of a data set whose model calls tools: the way of `answer_scores.py`, in several turns."""

from collections.abc import Sequence
from typing import Any

from pipeline.data.turns import turns_to_json
from pipeline.errors import counted
from pipeline.generation.episodes import Episode, generate
from pipeline.generation.rollouts import GenerationStopped, RandomKey
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_scores import SamplePrompt, with_scores
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.answers import ChatModel, sampling_of
from pipeline.inference.tool_conversations import Calls, Talk, ToolConversation
from pipeline.rewards.pool import Value

ScoredAnswers = tuple[SamplePrompt, list[Answer], dict[str, list[Value]]]


def answers_with_tools(
    chat_model: ChatModel,
    prompts: Sequence[SamplePrompt],
    calls: Calls,
    settings: SampleSettings,
    *,
    batch_size: int,
    seed: int,
) -> tuple[list[ScoredAnswers], str]:
    """Return each prompt with its answers and each function's values for them; and in words, what was called.

    The ids and the text of an answer are those of all its turns, with what tools returned.

    Args:
        prompts: none twice.
        calls: those of functions and tools; there are tools.
        batch_size: prompts whose answers are sampled at once.

    Raises:
        InputError: a function or an environment breaks its interface, or fails for all of the first answers.
    """
    assert calls.tools is not None
    n, rows = settings.n, [training_row(one) for one in prompts]

    def ended(episode: Episode) -> None:
        calls.rewards.ended(episode.number // n, episode.sample, talk.response(episode))

    talk = Talk(calls.tools, rows, range(len(rows)), n, should_stop=lambda: False, note=ended)
    calls.rewards.begin(rows, chat_model.tokenizer, num_samples=n, step=0)
    try:
        rollout = generate(
            chat_model.sessions(),
            talk.prompts(),
            num_samples=n,
            num_slots=n * batch_size,
            sampling=sampling_of(settings),
            key=RandomKey(seed, "answer"),
            answers=talk,
            should_stop=talk.stops,
        )
    except GenerationStopped:
        assert talk.error is not None  # nothing else stops it
        raise talk.error from None
    by_row, weights = calls.rewards.wait(lambda: False), {one.name: one.weight for one in calls.rewards.functions}
    ends = zip(rollout.responses, rollout.finished.tolist(), rollout.log_probs, strict=True)
    answers = [
        chat_model.answer(ids.tolist(), "end" if finished else "limit", log_probs.double().sum().item())
        for ids, finished, log_probs in ends
    ]
    scored = [
        (prompt, with_scores(answers[index * n : (index + 1) * n], by_row[index], weights), by_row[index])
        for index, prompt in enumerate(prompts)
    ]
    return scored, tool_use(talk.conversations)


def training_row(prompt: SamplePrompt) -> dict[str, Any]:
    """Return a prompt as rows of training have it."""
    messages, tokens = turns_to_json(prompt.messages), prompt.tokens
    return {"messages": messages, "extra": prompt.columns, "prompt_ids": tokens.ids, "prompt_id": tokens.prompt_id}


def tool_use(conversations: Sequence[ToolConversation]) -> str:
    """Return in words how many turns and calls the conversations had on average, and how many calls failed."""
    turns, num_calls = sum(one.num_turns for one in conversations), sum(one.num_calls for one in conversations)
    failed, seconds = sum(one.num_failed for one in conversations), sum(one.seconds for one in conversations)
    means = f"{turns / len(conversations):.2f} turns and {num_calls / len(conversations):.2f} calls an answer"
    return f"{means}; {failed:,} of {counted(num_calls, 'call')} failed; {seconds:.1f} s in tools"
